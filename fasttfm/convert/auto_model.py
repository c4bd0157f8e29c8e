"""fasttfm's translation models as Hugging Face's AutoModelForSeq2SeqLM.

    register()                                                 # once
    model = AutoModelForSeq2SeqLM.from_pretrained(DIR)         # a directory of Transformer.save_pretrained()
    model.generate(input_ids=ids, attention_mask=mask)

PEFT adapters can wrap its layers. translate.Translator is faster. Needs the package transformers.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.errors import UserError, optional

try:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
except ImportError:
    optional("transformers", "hf")
    raise

from fasttfm.config.decoding import DecodingConfig
from fasttfm.convert.auto_model_config import FasttfmConfig
from fasttfm.convert.exchange import generation_settings, shapes
from fasttfm.convert.padding import Rows
from fasttfm.convert.tokenizer_json import write_tokenizer
from fasttfm.data.tokenizer import BOS, EOS, PAD, Tokenizer
from fasttfm.data.tokenizer_files import PIECES_FILE
from fasttfm.models import Transformer
from fasttfm.models.cache import DecoderCache
from fasttfm.models.model import recorded_weights
from fasttfm.models.plain import apply_linear
from fasttfm.models.pretrained import MODEL_TYPE, copy_tokenizers, describe, read_pretrained, write_files
from fasttfm.store.model_dir import CONFIG_FILE
from fasttfm.store.weights import model_weights, with_weights
from fasttfm.system.folders import MANIFEST

_OF_HUB = ("cache_dir", "force_download", "local_files_only", "low_cpu_mem_usage", "proxies", "resume_download",
           "revision", "token", "trust_remote_code", "use_safetensors", "weights_only")  # fmt: skip
"""Options of from_pretrained() that only concern downloads."""
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
"""Name of the cache in transformers' calls and outputs: `cache` since 5.24."""


class GenerationCache(DecoderCache):
    """KV cache with the interface that generate() expects."""

    is_compileable, is_linear = False, (False,)

    def get_seq_length(self) -> int:
        """Number of cached target positions."""
        return self.length

    def reorder_cache(self, rows: Tensor) -> None:
        """Let row r continue the hypothesis in row rows[r] of the same sentence."""
        self.reorder(rows, memory=False)


class _Encoder(nn.Module):
    """The encoder, as returned by get_encoder()."""

    def __init__(self, model: "FasttfmForSeq2SeqLM") -> None:
        super().__init__()
        self.models = [model]  # a list, so that the model is not registered as a submodule

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Encode input_ids (B, S); padding may be anywhere."""
        model = self.models[0]
        attentions, states, return_dict = model._or_config(output_attentions, output_hidden_states, return_dict)
        output = model._encoded(input_ids, model._source_rows(input_ids, attention_mask), attentions, states)
        return output if return_dict else output.to_tuple()


class FasttfmForSeq2SeqLM(PreTrainedModel, GenerationMixin):
    """models.Transformer with transformers' arguments and outputs; padding may be anywhere in a row."""

    config_class = FasttfmConfig
    main_input_name = "input_ids"
    accepts_loss_kwargs = True

    def __init__(self, config: FasttfmConfig, model: Transformer | None = None) -> None:
        super().__init__(config)
        self.model = model or Transformer(config.transformer())
        self.register_load_state_dict_pre_hook(_with_prefix)
        shared = {"decoder": ["output"], "all": ["output", "source_embedding"]}.get(config.share_embeddings, [])
        self._tied_weights_keys = {f"model.{name}.weight": "model.target_embedding.weight" for name in shared}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: models.Transformer initializes its weights."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *_: Any, config: Any = None, **options: Any
    ) -> Any:
        """Load a local directory. UserError for missing or damaged files, ValueError for an unsupported option.

        dtype: of the weights, default float32. Fields of the configuration, such as dropout, are accepted too.
        output_loading_info: return (model, info); info lists no missing or unexpected weights.
        """
        path = Path(pretrained_model_name_or_path, options.pop("subfolder", None) or "")
        with_info = options.pop("output_loading_info", False)
        dtype = options.pop("dtype", options.pop("torch_dtype", None))
        if config is None:
            config, options = FasttfmConfig.from_pretrained(path, return_unused_kwargs=True, **options)
        adapter = (options.pop("adapter_kwargs", None) or {}).get("_adapter_model_path")  # set by AutoModel with peft
        _refuse({name: value for name, value in options.items() if name not in _OF_HUB})
        weights, saved = read_pretrained(path)[1:]
        model = cls(config, with_weights(lambda: Transformer(config.transformer()), weights, saved))
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
        else:
            model.generation_config = GenerationConfig(**generation_settings(DecodingConfig(**config.decoding)))
        config.name_or_path = str(path)
        if dtype not in (None, "auto"):
            model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        if adapter is not None:
            model.load_adapter(adapter)
        info: dict[str, Any] = {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        return (model.eval(), {**info, "error_msgs": []}) if with_info else model.eval()

    def save_pretrained(
        self,
        folder: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **others: Any,
    ) -> None:
        """Write a directory for from_pretrained() and Transformer.from_pretrained(), with the original's tokenizer.

        Shared tables are written once; other files in the directory stay. UserError for a directory of `fasttfm train`.
        """
        if others.pop("push_to_hub", False):
            raise ValueError("push_to_hub is not supported: write a directory and upload it with huggingface_hub")
        if getattr(self, "_hf_peft_config_loaded", False):  # after add_adapter() transformers saves only the adapter
            super().save_pretrained(folder, is_main_process, None if state_dict is None else dict(state_dict), **others)
            return
        if not is_main_process:
            return
        folder = Path(folder)
        if (folder / CONFIG_FILE).exists():
            raise UserError(f"{folder}: is a model directory of fasttfm train: choose another one")
        weights: Mapping[str, Tensor] = model_weights(self.model)
        if weights.keys() != shapes(self.config.transformer()).keys():
            raise ValueError("the model has adapters in it: save them by PEFT, or merge_and_unload() before")
        folder.mkdir(parents=True, exist_ok=True)
        if state_dict is not None:  # weights gathered by a wrapper such as FSDP
            gathered = {name.removeprefix("model."): each for name, each in state_dict.items()}
            weights = {name: gathered[name] for name in weights}
        (folder / MANIFEST).unlink(missing_ok=True)  # Trainer adds files that the digests do not cover
        write_files(folder, describe(self.config.transformer(), DecodingConfig(**self.config.decoding)), weights)
        origin = Path(self.config.name_or_path or folder)
        if origin != folder and origin.is_dir():
            copy_tokenizers(origin, folder)
        if (folder / PIECES_FILE).is_file():
            write_tokenizer(Tokenizer.load(folder / PIECES_FILE), folder, "end")
        self.generation_config.save_pretrained(folder)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        """Return the encoder: input_ids (B, S) to (B, S, d)."""
        return _Encoder(self)

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embedding."""
        return self.model.source_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the source embedding and the tables tied to it."""
        if self.config.share_embeddings == "all":
            self.model.target_embedding, self.model.output.weight = value, value.weight
        self.model.source_embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the output projection."""
        return self.model.output

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Truncate the vocabulary or add tokens; new rows are the mean of the others (mean_resizing) or random.

        Returns the embedding. ValueError unless all tables are shared. Tokenizer files are unchanged: a resized model
        needs a transformers tokenizer and does not work with fasttfm translate.
        """
        table = self.model.target_embedding
        if self.model.source_embedding is not table:
            raise ValueError("share_embeddings is not all: separate tables cannot be resized")
        size = new_num_tokens or table.num_embeddings
        size = -(-size // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
        if size <= EOS:
            raise ValueError(f"new_num_tokens is {new_num_tokens}: four tokens are special, so more are needed")
        self.model.config = dataclasses.replace(self.model.config, vocab_size=size)
        std = 0.0 if mean_resizing else self.config.d_model**-0.5
        table.weight = self.model.output.weight = _resized(table.weight, size, std)
        if self.model.output.bias is not None:
            self.model.output.bias = _resized(self.model.output.bias, size, 0.0)
        table.num_embeddings = self.model.output.out_features = self.config.vocab_size = size
        return table

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Recompute layers in the backward pass to save memory."""
        self.model.checkpoint_activations(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations for the backward pass."""
        self.model.checkpoint_activations(False)

    def generate(self, inputs: Tensor | None = None, *others: Any, **options: Any) -> Any:
        """Call transformers' generate(); without attention_mask it is derived from pad_token_id."""
        source = options.get("input_ids") if inputs is None else inputs
        if source is not None and options.get("attention_mask") is None:
            options["attention_mask"] = (source != self.config.pad_token_id).long()
        if (cache := _one_cache(options.pop("cache", None), options.pop("past_key_values", None))) is not None:
            options[CACHE] = cache
        return super().generate(inputs, *others, **options)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        decoder_attention_mask: Tensor | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of forward() for a step; the name `kwargs` lets generate() take forward()'s options."""
        cache = _one_cache(cache, past_key_values)
        if decoder_attention_mask is not None:  # covers only the caller's prefix
            new = input_ids.shape[1] - decoder_attention_mask.shape[1]
            decoder_attention_mask = nn.functional.pad(decoder_attention_mask, (0, new), value=1)
        return {
            "decoder_input_ids": input_ids if cache is None else input_ids[:, cache.length :],
            "decoder_attention_mask": decoder_attention_mask,
            CACHE: cache,
            **{name: kwargs.get(name) for name in ("encoder_outputs", "attention_mask", "use_cache")},
        }

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels (B, L) right and prepend the start token; -100 becomes padding."""
        shifted = labels[:, :-1].masked_fill(labels[:, :-1] == -100, PAD)
        return torch.cat([torch.full_like(labels[:, :1], BOS), shifted], dim=1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Compute logits (B, L, V) of decoder_input_ids (B, L), and with labels (B, L; -100 ignored) the mean loss.

        attention_mask, decoder_attention_mask: 1 at tokens, 0 at padding, anywhere; None: derived from pad_token_id for
        sources, no padding for targets. num_items_in_batch: divisor of the loss instead of the number of labels.
        use_cache: return a cache with which the next call takes only new targets; ignored with decoder_attention_mask,
        output_attentions or gradients. output_attentions: return every layer's weights, without dropout.
        output_hidden_states: return every layer's input and the final norm's output.
        """
        _refuse(others)
        attentions, states, return_dict = self._or_config(output_attentions, output_hidden_states, return_dict)
        if labels is not None and decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise ValueError("decoder_input_ids or labels are needed: for a search there is generate()")
        encoded = encoder_outputs
        if encoded is not None:
            source = self._source_rows(encoded[0], attention_mask)
        elif input_ids is not None:
            source = self._source_rows(input_ids, attention_mask)
            encoded = self._encoded(input_ids, source, attentions, states)
        else:
            raise ValueError("input_ids or encoder_outputs are needed")
        memory = encoded[0]
        target = Rows.of(decoder_attention_mask, decoder_input_ids, "decoder_attention_mask")
        kept = use_cache and decoder_attention_mask is None and not attentions and not torch.is_grad_enabled()
        cache = _one_cache(cache, past_key_values) or (GenerationCache() if kept else None)
        layers = self.model.decoder.layers
        with (
            _layer_inputs(layers if states else []) as inputs,
            recorded_weights(layer.self_attn for layer in layers if attentions) as self_weights,
            recorded_weights(layer.multihead_attn for layer in layers if attentions) as cross_weights,
        ):
            hidden = self.model._decode(
                target.packed(decoder_input_ids),
                target.lengths,
                source.packed(memory),
                source.lengths,
                self.model._seed(),
                cache=cache,
            )
        scores = target.unpacked(apply_linear(self.model.output, hidden))
        output = Seq2SeqLMOutput(
            loss=None if labels is None else _loss(scores, labels, num_items_in_batch),
            logits=scores,
            **{CACHE: cache},
            encoder_last_hidden_state=memory,
            decoder_attentions=_unpacked(self_weights, target, target) if attentions else None,
            cross_attentions=_unpacked(cross_weights, target, source) if attentions else None,
            encoder_attentions=getattr(encoded, "attentions", None) if attentions else None,
            decoder_hidden_states=tuple(map(target.unpacked, [*inputs, hidden])) if states else None,
            encoder_hidden_states=getattr(encoded, "hidden_states", None) if states else None,
        )
        return output if return_dict else output.to_tuple()

    def _or_config(self, *flags: bool | None) -> tuple[bool, ...]:
        """Return output_attentions, output_hidden_states and return_dict, from the configuration if None."""
        names = ("output_attentions", "output_hidden_states", "return_dict")
        return tuple(getattr(self.config, name) if flag is None else flag for name, flag in zip(names, flags))

    def _source_rows(self, tokens: Tensor, mask: Tensor | None) -> Rows:
        """Return the Rows of token ids (B, S) or of an encoder output (B, S, d)."""
        if mask is None and not tokens.is_floating_point():
            mask = tokens != self.config.pad_token_id
        return Rows.of(mask, tokens, "attention_mask")

    def _encoded(self, tokens: Tensor, rows: Rows, attentions: bool, states: bool) -> BaseModelOutput:
        layers = self.model.encoder.layers
        with (
            _layer_inputs(layers if states else []) as inputs,
            recorded_weights(layer.self_attn for layer in layers if attentions) as weights,
        ):
            memory = self.model.encode(rows.packed(tokens), rows.lengths)
        return BaseModelOutput(
            last_hidden_state=rows.unpacked(memory),
            attentions=_unpacked(weights, rows, rows) if attentions else None,
            hidden_states=tuple(map(rows.unpacked, [*inputs, memory])) if states else None,
        )


def register() -> None:
    """Register the model type of Transformer.save_pretrained() with AutoConfig and AutoModelForSeq2SeqLM."""
    AutoConfig.register(MODEL_TYPE, FasttfmConfig, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FasttfmConfig, FasttfmForSeq2SeqLM, exist_ok=True)


@torch.no_grad()
def _resized(rows: Tensor, size: int, std: float) -> nn.Parameter:
    """Resize rows (V, ...); new rows are normal(0, std), or the mean of the others if std is 0."""
    new = rows.new_empty((max(0, size - len(rows)), *rows.shape[1:]))
    new = new.normal_(0.0, std) if std else new.copy_(rows.mean(dim=0))
    return nn.Parameter(torch.cat([rows[:size], new]), requires_grad=rows.requires_grad)


def _loss(scores: Tensor, labels: Tensor, number: Tensor | int | None) -> Tensor:
    """Cross entropy of logits (B, L, V): the mean over labels (B, L), or the sum divided by a number."""
    reduction = "mean" if number is None else "sum"
    loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), reduction=reduction)
    return loss if number is None else loss / number


@contextlib.contextmanager
def _layer_inputs(layers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Record the inputs (B, L, d) of these layers in the yielded list."""
    inputs: list[Tensor] = []
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])).remove)
        yield inputs


def _unpacked(weights: list[Tensor], queries: Rows, keys: Rows) -> tuple[Tensor, ...]:
    """Move attention weights (B, H, L, S) of every layer back to the tokens' original positions."""
    return tuple(keys.unpacked(queries.unpacked(each, dim=2), dim=3) for each in weights)


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise ValueError for unsupported arguments of transformers, unless None or False."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported by {FasttfmForSeq2SeqLM.__name__}: leave it out")


def _one_cache(cache: Any, past_key_values: Any) -> GenerationCache | None:
    """Return the cache passed under either name. ValueError for both, or for a cache that is not a GenerationCache."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are both given: they are one argument, give cache alone")
    value, name = (past_key_values, "past_key_values") if cache is None else (cache, "cache")
    if not isinstance(value, GenerationCache | None):
        raise ValueError(f"{name} is a {type(value).__name__}: give what a call with use_cache=True returned")
    return value


def _with_prefix(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Hook for load_state_dict(): accepts the names in model.safetensors, which has a shared table once."""
    first: dict[int, str] = {}  # id of a tensor -> its first name
    for name, tensor in module.model.state_dict(keep_vars=True).items():  # type: ignore[union-attr]
        own = f"{prefix}model.{name}"
        if f"{prefix}{name}" in state_dict:
            state_dict[own] = state_dict.pop(f"{prefix}{name}")
        origin = first.setdefault(id(tensor), own)
        if origin in state_dict:
            state_dict.setdefault(own, state_dict[origin])
