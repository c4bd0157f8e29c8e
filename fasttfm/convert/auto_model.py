"""Our models behind Hugging Face's AutoModelForSeq2SeqLM.

    register()                                                 # once
    model = AutoModelForSeq2SeqLM.from_pretrained(DIR)         # what Transformer.save_pretrained() wrote
    model.generate(input_ids=ids, attention_mask=mask)

PEFT's adapters wrap its layers. For speed there is decoding.Translator. Needs the package transformers.
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
from fasttfm.convert.exchange import generation_settings
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
           "revision", "subfolder", "token", "trust_remote_code", "use_safetensors", "weights_only")  # fmt: skip
"""Options of from_pretrained() that only say how files come here."""
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
"""Name of the cache in transformers' calls and outputs: `cache` since 5.24."""


class GenerationCache(DecoderCache):
    """Keys and values between the steps of generate(), whose names of its calls these are."""

    is_compileable, is_linear = False, (False,)

    def get_seq_length(self) -> int:
        """Target positions seen."""
        return self.length

    def reorder_cache(self, rows: Tensor) -> None:
        """Row r goes on from what row rows[r] of the same sentence was."""
        self.reorder(rows, memory=False)


class _Encoder(nn.Module):
    """The encoder, which generate() calls first."""

    def __init__(self, model: "FasttfmForSeq2SeqLM") -> None:
        super().__init__()
        self.models = [model]  # in a list, whose parameters are not this module's too

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """The encoder's output for input_ids (B, S), padding anywhere."""
        model = self.models[0]
        attentions, states, return_dict = model._asked(output_attentions, output_hidden_states, return_dict)
        output = model._encoded(input_ids, model._source_rows(input_ids, attention_mask), attentions, states)
        return output if return_dict else output.to_tuple()


class FasttfmForSeq2SeqLM(PreTrainedModel, GenerationMixin):
    """A models.Transformer with transformers' arguments and outputs; padding may be anywhere in a row."""

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
        """Nothing: models.Transformer draws its weights itself."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *_: Any, config: Any = None, **options: Any
    ) -> Any:
        """The model of a directory on this machine. UserError for what is missing or damaged, ValueError for an option
        that is not supported.

        dtype: of the weights; float32 unless given. Fields of the configuration, such as dropout, may be given too.
        output_loading_info: return a pair, whose second says that all weights were there.
        """
        path, with_info = pretrained_model_name_or_path, options.pop("output_loading_info", False)
        dtype = options.pop("dtype", options.pop("torch_dtype", None))
        if config is None:
            config, options = FasttfmConfig.from_pretrained(path, return_unused_kwargs=True, **options)
        adapter = (options.pop("adapter_kwargs", None) or {}).get("_adapter_model_path")  # AutoModel's, with peft
        _refuse({name: value for name, value in options.items() if name not in _OF_HUB})
        weights, saved = read_pretrained(Path(path))[1:]
        model = cls(config, with_weights(lambda: Transformer(config.transformer()), weights, saved))
        if Path(path, "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
        else:
            model.generation_config = GenerationConfig(**generation_settings(DecodingConfig(**config.decoding)))
        config.name_or_path = str(path)
        if dtype not in (None, "auto"):
            model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        if adapter is not None:
            model.load_adapter(adapter)
        nothing: dict[str, Any] = {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        return (model.eval(), {**nothing, "error_msgs": []}) if with_info else model.eval()

    def save_pretrained(
        self,
        folder: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **others: Any,
    ) -> None:
        """Write what from_pretrained() and Transformer.from_pretrained() read, a shared table once, with the tokenizer
        of the directory that the model came from. Other files stay. UserError for a directory of `fasttfm train`."""
        if others.pop("push_to_hub", False):
            raise ValueError("push_to_hub is not supported: write a directory, and give it to huggingface_hub")
        if getattr(self, "_hf_peft_config_loaded", False):  # add_adapter(): the adapter is saved, as everywhere
            super().save_pretrained(folder, is_main_process, None if state_dict is None else dict(state_dict), **others)
            return
        if not is_main_process:
            return
        place = Path(folder)
        if (place / CONFIG_FILE).exists():
            raise UserError(f"{place}: is a model directory of fasttfm train: choose another one")
        weights: Mapping[str, Tensor] = model_weights(self.model)
        with torch.device("meta"):
            if weights.keys() != model_weights(Transformer(self.config.transformer())).keys():
                raise ValueError("the model has adapters in it: save them by PEFT, or merge_and_unload() before")
        place.mkdir(parents=True, exist_ok=True)
        if state_dict is not None:  # of a wrapper that has gathered the weights
            given = {name.removeprefix("model."): each for name, each in state_dict.items()}
            weights = {name: given[name] for name in weights}
        (place / MANIFEST).unlink(missing_ok=True)  # Trainer writes into directories that have more files
        fields = describe(self.config.transformer(), DecodingConfig(**self.config.decoding))
        write_files(place, fields, weights)
        origin = Path(self.config.name_or_path or place)
        if origin != place and origin.is_dir():
            copy_tokenizers(origin, place)
        if (place / PIECES_FILE).is_file():
            write_tokenizer(Tokenizer.load(place / PIECES_FILE), place, "end")
        self.generation_config.save_pretrained(place)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        """The encoder: input_ids (B, S) to (B, S, d)."""
        return _Encoder(self)

    def get_input_embeddings(self) -> nn.Module:
        """The source's table."""
        return self.model.source_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another table of the source, and of what shares it."""
        if self.config.share_embeddings == "all":
            self.model.target_embedding, self.model.output.weight = value, value.weight
        self.model.source_embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """The output's projection."""
        return self.model.output

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Cut the vocabulary off, or add tokens, whose rows are the mean of the others (mean_resizing) or drawn.

        Returns the embedding. ValueError where the sides have tables of their own. The tokenizer's files stay: with
        other tokens than it has, the model is used with a tokenizer of transformers, and not by fasttfm translate.
        """
        table = self.model.target_embedding
        if self.model.source_embedding is not table:
            raise ValueError("share_embeddings is not all: a table of each side cannot be resized")
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
        """Layers are computed again in the backward pass: less memory."""
        self.model.checkpoint_activations(True)

    def gradient_checkpointing_disable(self) -> None:
        """Layers keep what their gradients need."""
        self.model.checkpoint_activations(False)

    def generate(self, inputs: Tensor | None = None, *others: Any, **options: Any) -> Any:
        """transformers' generate(); without attention_mask, padding's number tells what is padding."""
        source = options.get("input_ids") if inputs is None else inputs
        if source is not None and options.get("attention_mask") is None:
            options["attention_mask"] = (source != self.config.pad_token_id).long()
        if (cache := _one_cache(options.pop("cache", None), options.pop("past_key_values", None))) is not None:
            options[CACHE] = cache
        return super().generate(inputs, *others, **options)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        encoder_outputs: Any = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of forward() at a step; a parameter named kwargs makes generate() take what they are."""
        cache = _one_cache(cache, past_key_values)
        if decoder_attention_mask is not None:  # of the prefix that the caller gave
            new = input_ids.shape[1] - decoder_attention_mask.shape[1]
            decoder_attention_mask = nn.functional.pad(decoder_attention_mask, (0, new), value=1)
        return {
            "decoder_input_ids": input_ids if cache is None else input_ids[:, cache.length :],
            "encoder_outputs": encoder_outputs,
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            CACHE: cache,
            "use_cache": use_cache,
        }

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels (B, L) one to the right, behind the token that begins a sentence; -100 becomes padding."""
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
        """Logits (B, L, V) of decoder_input_ids (B, L); with labels (B, L), -100 ignored, the mean loss too.

        attention_mask, decoder_attention_mask: 1 at tokens, 0 at padding wherever it is; None: padding's number tells
        of sources, targets have none. num_items_in_batch: what the loss is divided by in place of its own labels.
        use_cache gives a cache (or past_key_values), with which the next call takes the targets that are new; not with
        decoder_attention_mask, output_attentions or gradients: all are computed anew. output_attentions gives every
        layer's weights, without dropout, output_hidden_states every layer's input and the final norm's output.
        """
        _refuse(others)
        attentions, states, return_dict = self._asked(output_attentions, output_hidden_states, return_dict)
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
            decoder_attentions=_placed(self_weights, target, target) if attentions else None,
            cross_attentions=_placed(cross_weights, target, source) if attentions else None,
            encoder_attentions=getattr(encoded, "attentions", None) if attentions else None,
            decoder_hidden_states=tuple(map(target.unpacked, [*inputs, hidden])) if states else None,
            encoder_hidden_states=getattr(encoded, "hidden_states", None) if states else None,
        )
        return output if return_dict else output.to_tuple()

    def _asked(self, *given: bool | None) -> tuple[bool, ...]:
        """output_attentions, output_hidden_states and return_dict, or where they are None the configuration's."""
        names = ("output_attentions", "output_hidden_states", "return_dict")
        return tuple(getattr(self.config, name) if each is None else each for name, each in zip(names, given))

    def _source_rows(self, tokens: Tensor, mask: Tensor | None) -> Rows:
        """Rows of token numbers (B, S), or of an encoder's output (B, S, d)."""
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
            attentions=_placed(weights, rows, rows) if attentions else None,
            hidden_states=tuple(map(rows.unpacked, [*inputs, memory])) if states else None,
        )


def register() -> None:
    """Make directories of Transformer.save_pretrained() known to AutoConfig and AutoModelForSeq2SeqLM."""
    AutoConfig.register(MODEL_TYPE, FasttfmConfig, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FasttfmConfig, FasttfmForSeq2SeqLM, exist_ok=True)


@torch.no_grad()
def _resized(rows: Tensor, size: int, std: float) -> nn.Parameter:
    """Rows (V, ...) of another number; new ones are normal(0, std), or with std 0 the mean of the others."""
    new = rows.new_empty((max(0, size - len(rows)), *rows.shape[1:]))
    new = new.normal_(0.0, std) if std else new.copy_(rows.mean(dim=0))
    return nn.Parameter(torch.cat([rows[:size], new]), requires_grad=rows.requires_grad)


def _loss(scores: Tensor, labels: Tensor, number: Tensor | int | None) -> Tensor:
    """Cross entropy of logits (B, L, V): the mean over labels (B, L), or their sum through a number."""
    reduction = "mean" if number is None else "sum"
    loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), reduction=reduction)
    return loss if number is None else loss / number


@contextlib.contextmanager
def _layer_inputs(layers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Inside, every call of these layers appends its input (B, L, d) to the list."""
    inputs: list[Tensor] = []
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])).remove)
        yield inputs


def _placed(weights: list[Tensor], queries: Rows, keys: Rows) -> tuple[Tensor, ...]:
    """Attention weights (B, H, L, S) of every layer, where the tokens stood."""
    return tuple(keys.unpacked(queries.unpacked(each, dim=2), dim=3) for each in weights)


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of transformers that says something and is not supported."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported by {FasttfmForSeq2SeqLM.__name__}: leave it out")


def _one_cache(cache: Any, past_key_values: Any) -> GenerationCache | None:
    """The cache under either name. ValueError for both, or for what is not ours."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are both given: they are one argument, give cache alone")
    given = past_key_values if cache is None else cache
    if not isinstance(given, GenerationCache | None):
        name = "past_key_values" if cache is None else "cache"
        raise ValueError(f"{name} is a {type(given).__name__}: give what a call with use_cache=True returned")
    return given


def _with_prefix(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Lets load_state_dict() take the names of model.safetensors, which has a shared table once."""
    own = f"{prefix}model."
    names = {name.removeprefix(own): name for name in module.model.state_dict()}  # type: ignore[union-attr]
    for name in names:
        if f"{prefix}{name}" in state_dict:
            state_dict[own + name] = state_dict.pop(f"{prefix}{name}")
    for first, *same in _shared(module.model):  # type: ignore[arg-type]
        for name in same:
            if own + first in state_dict:
                state_dict.setdefault(own + name, state_dict[own + first])


def _shared(model: Transformer) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]
