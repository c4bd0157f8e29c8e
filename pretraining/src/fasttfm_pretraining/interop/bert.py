"""BERT, ALBERT and ELECTRA as Hugging Face's transformers saves them: config.json and weights, read and written;
RoBERTa and DistilBERT are read as the BERTs that they are (bert_relatives.py).

https://huggingface.co/docs/transformers/model_doc/bert, albert and electra. Heads present in the
folder are read: both of BertForPreTraining and AlbertForPreTraining, one of a masked language model, none of a bare
body. ELECTRA's generator and discriminator are two folders. No code in the files is run.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm.convert.config_json import (
    THEIR_ACTIVATIONS,
    Field,
    configuration,
    described,
    our_activation,
    read_config,
    refuse_others,
    tell_unknown_fields,
)
from fasttfm.convert.names import Parameter, Table, TheirWeights, parameters, renamed, theirs
from fasttfm.convert.weight_files import read_tensors
from fasttfm.errors import UserError
from fasttfm.models.pretrained import write_files
from fasttfm.system.parsing import field
from fasttfm_pretraining.config.bert import AlbertConfig, BertConfig, ElectraConfig
from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop.bert_relatives import RELATIVES, as_bert
from fasttfm_pretraining.models.bert import Bert, BertPretraining, MaskedHead
from fasttfm_pretraining.models.electra import Electra, ReplacedHead

_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("d_model", "hidden_size"),
    Field("layers", "num_hidden_layers"),
    Field("heads", "num_attention_heads"),
    Field("d_ff", "intermediate_size"),
    Field("dropout", "hidden_dropout_prob", 0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
    Field("max_length", "max_position_embeddings"),
    Field("segments", "type_vocab_size", 2),
    Field("init_std", "initializer_range", 0.02),
    Field("layer_norm_eps", "layer_norm_eps", 1e-12),
)
_OTHER_FIELDS = {
    *("embedding_size", "hidden_act", "num_hidden_groups", "abstains", "null_threshold"),
    *("classifier_dropout", "classifier_dropout_prob", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"),
    *("summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj", "net_structure_type"),
    *("num_memory_blocks", "gap_size", "down_scale_factor", "directionality", "pooler_fc_size"),
    *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
}
"""Fields that are read elsewhere, or that published models have but that have no effect."""
_TABLES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.segment": "embeddings.token_type_embeddings",
}
_BERT_LAYER: Table = {
    "self_attn.in_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
_ALBERT_LAYER: Table = {
    "self_attn.in_proj": ("attention.query", "attention.key", "attention.value"),
    "self_attn.out_proj": "attention.dense",
    "norm1": "attention.LayerNorm",
    "linear1": "ffn",
    "linear2": "ffn_output",
    "norm2": "full_layer_layer_norm",
}


class _Family(NamedTuple):
    """Parameter names of one family."""

    prefix: str
    projection: str
    pooler: str
    layer: str
    """Prefix of a layer, with a placeholder for its number."""
    names: Table
    """Their names of a layer's parts, by ours."""
    masked: tuple[str, str, str, str]
    """The masked-token head: transform, norm, table of the logits, their bias."""
    sentence: str


_FAMILIES = {
    "bert": _Family(
        "bert.", "", "pooler.dense", "encoder.layer.{}.", _BERT_LAYER,
        ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder.weight",
         "cls.predictions.bias"), "cls.seq_relationship",
    ),
    "albert": _Family(
        "albert.", "encoder.embedding_hidden_mapping_in", "pooler",
        "encoder.albert_layer_groups.{}.albert_layers.0.", _ALBERT_LAYER,
        ("predictions.dense", "predictions.LayerNorm", "predictions.decoder.weight", "predictions.bias"),
        "sop_classifier.classifier",
    ),
    "electra": _Family(
        "electra.", "embeddings_project", "", "encoder.layer.{}.", _BERT_LAYER,
        ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.weight",
         "generator_lm_head.bias"), "",
    ),
}  # fmt: skip
POSITIONS = r".*\.position_ids"
"""Position ids, which are computed."""
_GELU_HEAD = "the head of masked tokens of an ELECTRA or RoBERTa has gelu whatever its layers have: give gelu"
_REPLACED = {"transform": "discriminator_predictions.dense", "output": "discriminator_predictions.dense_prediction"}


def read_body(folder: Path) -> Bert:
    """Read the body of a BERT, an ALBERT or either part of an ELECTRA, in float32, without heads.

    Raises UserError for missing or truncated files, or another architecture.
    """
    family, config, weights = read_family(folder)
    config = dataclasses.replace(config, sentence_head=False, pooler=_has(weights, family, family.pooler))
    body = Bert(config)
    fill(body, weights, body_parameters(body, family))
    return body.eval()


def read_pretraining(folder: Path) -> BertPretraining:
    """Read body and heads of a BERT or an ALBERT; heads missing from the folder are initialized.

    Raises UserError as read_body(), and for a body without pooler, which the sentence-pair head needs.
    """
    family, config, weights = read_family(folder)
    if family is _FAMILIES["electra"]:
        raise UserError(f"{folder}: is an ELECTRA: give generator and discriminator together, as two folders")
    sentence = f"{family.sentence}.weight" in weights
    if sentence:
        weights[f"{family.prefix}{family.pooler}.weight"]  # which it reads
    config = dataclasses.replace(config, sentence_head=sentence, pooler=_has(weights, family, family.pooler))
    model = BertPretraining(config)
    fill(model.body, weights, body_parameters(model.body, family))
    if f"{family.masked[0]}.weight" in weights:
        fill(model.masked, weights, _masked_parameters(family))
    else:
        message = f"{folder}: has no head of masked tokens: this model's begins with fresh weights"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    if model.sentence is not None:
        fill(model, weights, parameters({"sentence": family.sentence}))
    weights.tell_rest(POSITIONS)
    return model.eval()


def read_electra(discriminator: Path, generator: Path | None = None) -> Electra:
    """Read both parts of an ELECTRA, from the folders of ElectraForPreTraining and ElectraForMaskedLM.

    The embeddings are the discriminator's. Without a folder the generator is initialized, a quarter as wide. Raises
    UserError if the generator is not a smaller model of the same kind, or has other embeddings.
    """
    family, config, weights = read_family(discriminator)
    fields = dataclasses.asdict(config) | {"pooler": False, "sentence_head": False}
    if generator is None:
        model = Electra(ElectraConfig(**fields))
    else:
        _, small, other = read_family(generator)
        model = Electra(_electra_config(config, small, fields, discriminator, generator))
    fill(model.discriminator, weights, body_parameters(model.discriminator, family))
    if f"{_REPLACED['output']}.weight" in weights:
        fill(model.replaced, weights, parameters(_REPLACED))
    weights.tell_rest(POSITIONS)
    if generator is None:
        return model.eval()
    layers = (each for each in body_parameters(model.generator, family) if not each.ours.startswith("embeddings."))
    fill(model.generator, other, layers)
    fill(model.masked, other, _masked_parameters(family))
    for table in _TABLES.values():
        name = f"{family.prefix}{table}.weight"
        if not torch.equal(weights[name], other[name]):
            raise UserError(
                f"{generator}: has other {table}.weight than {discriminator}: they were not trained with one table"
            )
    return model.eval()


def _electra_config(
    config: BertConfig, small: BertConfig, fields: dict[str, Any], discriminator: Path, generator: Path
) -> ElectraConfig:
    """Configuration of both parts. Raises UserError if they do not match."""
    try:
        whole = ElectraConfig(**fields, generator_size=small.d_model / config.d_model)
    except ValueError as error:
        raise UserError(f"{generator}: is not a generator of {discriminator}: {error}") from None
    if whole.generator() != dataclasses.replace(small, pooler=False, sentence_head=False):
        raise UserError(
            f"{generator}: is not a generator of {discriminator}: with its width, {small.heads} heads and d_ff "
            f"{small.d_ff} must be {whole.generator().heads} and {whole.generator().d_ff}, and all else the same"
        )
    return whole


def write(
    model: Bert | BertPretraining | Electra, folder: Path, *, vocabulary: Mapping[str, int | None] | None = None
) -> None:
    """Write a folder for transformers' from_pretrained(): BertModel, BertForPreTraining (BertForMaskedLM without a
    sentence head) and ALBERT's; for ELECTRA the folders discriminator/ and generator/.

    vocabulary: config.json's special-token fields, such as {"pad_token_id": 0}. Raises UserError for a model without
    an equivalent in transformers: an ALBERT that shares only parts of its layers.
    """
    for name, part in parts(model).items():
        write_part(part, folder / name, vocabulary)


class TransformersModel(NamedTuple):
    """A model class of transformers."""

    kind: str
    """A key of _FAMILIES."""
    body: Bert
    head: MaskedHead | ReplacedHead | None = None
    sentence: nn.Linear | None = None
    task_head: tuple[str, nn.Module, Table] | None = None
    """Class name suffix in transformers, our class, and the names of the head's modules, by task."""

    @property
    def architecture(self) -> str:
        """Its class in transformers."""
        name = self.kind.capitalize()
        if self.task_head is not None:
            return f"{name}{self.task_head[0]}"
        if self.head is None:
            return f"{name}Model"
        pretraining = self.sentence is not None or isinstance(self.head, ReplacedHead)
        return f"{name}For{'PreTraining' if pretraining else 'MaskedLM'}"


def parts(model: Bert | BertPretraining | Electra) -> dict[str, TransformersModel]:
    """Equivalent models in transformers, by subfolder."""
    if isinstance(model, Electra):  # ElectraForPreTraining, and the generator as ElectraForMaskedLM
        return {
            "discriminator": TransformersModel("electra", model.discriminator, model.replaced),
            "generator": TransformersModel("electra", model.generator, model.masked),
        }
    if isinstance(model, BertPretraining):
        return {"": TransformersModel(_kind(model.body), model.body, model.masked, model.sentence)}
    return {"": TransformersModel(_kind(model), model)}


# ------------------------------------------------------------------------------------------------------------ reading


def read_family(folder: Path) -> tuple[_Family, BertConfig, TheirWeights]:
    """Read a folder's parameter names, body configuration, and matching weights."""
    path = folder / "config.json"
    given, weights = read_config(folder, *_FAMILIES, *RELATIVES), dict(read_tensors(folder))
    has_gelu_head = given["model_type"] in ("electra", "roberta")
    if given["model_type"] in RELATIVES:
        given, weights = as_bert(given, weights, path)
    config, family = _config(given, path), _FAMILIES[given["model_type"]]
    table = f"{family.prefix}{_TABLES['embeddings.word']}.weight"
    heads = ("cls.", "predictions.", "sop_", "generator_", "disc")
    prefix = "" if table in weights else family.prefix  # the bare body has none

    def our_name(name: str) -> str:
        name = name if name.startswith(heads) else prefix + name
        return name.replace("gamma", "weight").replace("beta", "bias")  # as TensorFlow called them

    weights = TheirWeights(folder, renamed(weights, our_name, folder))
    if has_gelu_head and config.activation != "gelu" and f"{family.masked[0]}.weight" in weights:
        raise UserError(f"{path}: hidden_act {given['hidden_act']}: {_GELU_HEAD}")
    layers, said = (1, "num_hidden_groups") if config.share == "all" else (config.layers, "num_hidden_layers")
    weights.refuse_other_layers(family.prefix + family.layer.partition("{")[0], layers, f"config.json's {said}")
    with torch.device("meta"):  # of whatever size config.json tells, nothing is built before it fits the weights
        body = Bert(dataclasses.replace(config, sentence_head=False, pooler=False))
    weights.ours(body_parameters(body, family), _shapes(body))
    *_, output, bias = family.masked
    weights.refuse_other_copies({output: table, f"{output.removesuffix('weight')}bias": bias})
    return family, config, weights


def _config(given: Mapping[str, Any], path: Path) -> BertConfig:
    """Our configuration for Hugging Face's. Raises UserError for unsupported fields."""
    allowed: dict[str, tuple[Any, ...]] = {
        "is_decoder": (None, False),
        "add_cross_attention": (None, False),
        "inner_group_num": (None, 1),
        "tie_word_embeddings": (None, True),
        "position_embedding_type": (None, "absolute"),
    }
    refuse_others(given, path, allowed)
    tell_unknown_fields(given, path, {*allowed, *(each.theirs for each in _FIELDS), *_OTHER_FIELDS})
    albert = given["model_type"] == "albert"
    layers = field(given, "num_hidden_layers", int, str(path))
    groups = field(given, "num_hidden_groups", int, str(path), 1) if albert else layers
    if groups not in (1, layers):
        raise UserError(f"{path}: num_hidden_groups {groups} is not supported: 1 or {layers}, one a layer, are")
    return configuration(
        AlbertConfig if albert else BertConfig,
        {**(dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0) if albert else {}), **given},
        path,
        _FIELDS,
        embedding_size=given.get("embedding_size"),
        share="all" if groups == 1 and albert else "none",
        activation=our_activation(given, path, "hidden_act", "gelu_new" if albert else "gelu"),
        pad_id=field(given, "pad_token_id", int, str(path), 0),
    )


def _has(weights: Mapping[str, Tensor], family: _Family, name: str) -> bool:
    return bool(name) and f"{family.prefix}{name}.weight" in weights


@torch.no_grad()
def fill(module: nn.Module, weights: TheirWeights, names: Iterable[Parameter]) -> None:
    """Copy another tool's tensors into parameters of a module."""
    for name, tensor in weights.ours(names, _shapes(module)).items():
        module.get_parameter(name).copy_(tensor)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in module.named_parameters(remove_duplicate=False)}


def body_parameters(body: Bert, family: _Family) -> Iterator[Parameter]:
    """Parameter names of a body; those of a shared layer once."""
    yield from parameters(_TABLES, "", family.prefix, kinds=("weight",))
    modules = {"embeddings.norm": "embeddings.LayerNorm"}
    if body.pooler is not None:
        modules["pooler"] = family.pooler
    if body.embedding_projection is not None:
        modules["embedding_projection"] = family.projection
    yield from parameters(modules, "", family.prefix)
    for number in range(1 if body.config.share == "all" else body.config.layers):
        yield from parameters(family.names, f"encoder.layers.{number}.", family.prefix + family.layer.format(number))


def _masked_parameters(family: _Family) -> Iterator[Parameter]:
    transform, norm, _, bias = family.masked
    yield from parameters({"transform": transform, "norm": norm})
    yield Parameter("bias", (bias,))


# ------------------------------------------------------------------------------------------------------------ writing


def write_part(part: TransformersModel, folder: Path, vocabulary: Mapping[str, Any] | None = None) -> None:
    """Write one part, as write() does."""
    kind, body, head, sentence, task_head = part
    config, family = body.config, _FAMILIES[kind]
    if kind == "albert" and config.share not in ("all", "none"):
        raise UserError(f"share {config.share}: transformers' ALBERT shares all of its layers or none")
    if kind == "albert" and body.embedding_projection is None:
        raise UserError("transformers' ALBERT always maps its embeddings to d_model: this one has none of that width")
    if kind == "electra" and isinstance(head, MaskedHead) and config.activation != "gelu":
        raise UserError(f"activation {config.activation}: {_GELU_HEAD}")
    tensors = _their_tensors(body, body_parameters(body, family))
    if isinstance(head, MaskedHead):
        tensors |= _their_tensors(head, _masked_parameters(family))
        tensors[family.masked[2]] = body.embeddings.word.weight
        if kind != "electra":  # whose bias has the decoder's own name
            tensors[f"{family.masked[2].removesuffix('weight')}bias"] = head.bias
    elif head is not None:
        tensors |= _their_tensors(head, parameters(_REPLACED))
    if sentence is not None:
        tensors |= {f"{family.sentence}.weight": sentence.weight, f"{family.sentence}.bias": sentence.bias}
    if task_head is not None:
        tensors |= _their_tensors(task_head[1], parameters(task_head[2]))
    elif head is None:
        tensors = {name.removeprefix(family.prefix): each for name, each in tensors.items()}
    fields = their_config(config, kind, part.architecture) | dict(vocabulary or {})
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder, fields, {name: each.float().clone() for name, each in tensors.items()})


def special_tokens(tokenizer: TextTokenizer) -> dict[str, int | None]:
    """config.json's special-token ids."""
    vocabulary = masking_vocabulary(tokenizer)
    return {
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": vocabulary.begin,
        "sep_token_id": vocabulary.end,
        "mask_token_id": vocabulary.mask,
    }


def _kind(body: Bert) -> str:
    """Model type in transformers that computes the same as a body."""
    if isinstance(body.config, AlbertConfig):
        return "albert"
    return "bert" if body.embedding_projection is None else "electra"


def _their_tensors(module: nn.Module, names: Iterable[Parameter]) -> dict[str, Tensor]:
    return theirs(dict(module.named_parameters(remove_duplicate=False)), names)


def their_config(config: BertConfig, kind: str, architecture: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model_type": kind,
        "architectures": [architecture],
        **described(config, _FIELDS),
        "hidden_act": THEIR_ACTIVATIONS[config.activation],
        "pad_token_id": config.pad_id,
        "tie_word_embeddings": True,
    }
    if kind != "bert":
        fields["embedding_size"] = config.embedding_width
    if kind == "albert":
        fields |= {"num_hidden_groups": 1 if config.share == "all" else config.layers, "inner_group_num": 1}
        fields["classifier_dropout_prob"] = config.dropout
    return fields
