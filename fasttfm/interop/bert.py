"""BERT, ALBERT and ELECTRA as Hugging Face's transformers saves them: config.json and weights, read and written.

https://huggingface.co/docs/transformers/model_doc/bert, albert and electra. Heads are read where the folder has them:
of BertForPreTraining and AlbertForPreTraining both, of a masked language model one, of the bare body none. Of ELECTRA,
generator and discriminator are two folders. No code in the files is run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm.config.bert import AlbertConfig, BertConfig, ElectraConfig
from fasttfm.errors import UserError
from fasttfm.files import read_json, write_file
from fasttfm.interop.exchange import read_tensors
from fasttfm.models.albert import Albert, AlbertPretraining
from fasttfm.models.bert import Bert, BertPretraining, MaskedHead
from fasttfm.models.electra import Electra, ReplacedHead

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
_EMBEDDINGS = {
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
    "embeddings.segment.weight": "embeddings.token_type_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
}
_BERT_LAYER = {
    "self_attn.in_proj": "attention.self.",
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
_ALBERT_LAYER = {
    "self_attn.in_proj": "attention.",
    "self_attn.out_proj": "attention.dense",
    "norm1": "attention.LayerNorm",
    "linear1": "ffn",
    "linear2": "ffn_output",
    "norm2": "full_layer_layer_norm",
}


class _Family(NamedTuple):
    """What one of the three calls its parameters."""

    prefix: str
    projection: str
    pooler: str
    layer: str
    """The prefix of a layer, with its number to be put in."""
    names: Mapping[str, str]
    """Our parts of a layer -> theirs."""
    masked: tuple[str, str, str, str]
    """The head of masked tokens: transform, norm, the table of the logits, their bias."""
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
PARTS = ("discriminator", "generator")
"""The folders of an ELECTRA."""
_REPLACED = {"transform": "discriminator_predictions.dense", "output": "discriminator_predictions.dense_prediction"}


def read_body(folder: Path) -> Bert:
    """The body of a BERT, an ALBERT or an ELECTRA (either part), in float32, without heads.

    Raises UserError for what is missing, cut off or of another architecture.
    """
    family, config, weights = _read(folder)
    config = dataclasses.replace(config, sentence_head=False, pooler=_has(weights, family, family.pooler))
    body = Albert(config) if isinstance(config, AlbertConfig) else Bert(config)
    _Reader(folder, weights).fill(body, dict(_body_names(body, family)))
    return body.eval()


def read_pretraining(folder: Path) -> BertPretraining:
    """The body and heads of a BERT or an ALBERT; a head that the folder has not begins with fresh weights.

    Raises UserError as read_body(), and for a body without pooler, which no sentence pair can be told from.
    """
    family, config, weights = _read(folder)
    if family is _FAMILIES["electra"]:
        raise UserError(f"{folder}: is an ELECTRA: give generator and discriminator together, as two folders")
    sentence = f"{family.sentence}.weight" in weights
    config = dataclasses.replace(config, sentence_head=sentence, pooler=_has(weights, family, family.pooler))
    model = AlbertPretraining(config) if isinstance(config, AlbertConfig) else BertPretraining(config)
    names = {f"body.{ours}": theirs for ours, theirs in _body_names(model.body, family)}
    if f"{family.masked[0]}.weight" in weights:
        names |= {f"masked.{ours}": theirs for ours, theirs in _masked_names(family)}
    if sentence:
        names |= {f"sentence.{kind}": f"{family.sentence}.{kind}" for kind in ("weight", "bias")}
    _Reader(folder, weights).fill(model, names)
    return model.eval()


def read_electra(discriminator: Path, generator: Path | None = None) -> Electra:
    """Both parts of an ELECTRA, from the folders of ElectraForPreTraining and ElectraForMaskedLM.

    The embeddings are the discriminator's. Without a generator it begins with fresh weights, a quarter as wide. Raises
    UserError where the generator is not a smaller one of the same kind, or has other embeddings.
    """
    family, config, weights = _read(discriminator)
    fields = dataclasses.asdict(config) | {"pooler": False, "sentence_head": False}
    if generator is None:
        model = Electra(ElectraConfig(**fields))
    else:
        _, small, other = _read(generator)
        model = Electra(_electra_config(config, small, fields, discriminator, generator))
    names = {f"discriminator.{ours}": theirs for ours, theirs in _body_names(model.discriminator, family)}
    if f"{_REPLACED['output']}.weight" in weights:
        names |= {
            f"replaced.{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in _REPLACED.items() for kind in _KINDS
        }
    _Reader(discriminator, weights).fill(model, names)
    if generator is None:
        return model.eval()
    names = {
        f"generator.{ours}": theirs
        for ours, theirs in _body_names(model.generator, family)
        if not ours.startswith("embeddings.")
    }
    names |= {f"masked.{ours}": theirs for ours, theirs in _masked_names(family)}
    _Reader(generator, other).fill(model, names)
    for ours, theirs in _EMBEDDINGS.items():
        if ours.endswith("weight") and not torch.equal(weights[family.prefix + theirs], other[family.prefix + theirs]):
            raise UserError(
                f"{generator}: has other {theirs} than {discriminator}: they were not trained with one table"
            )
    return model.eval()


def _electra_config(
    config: BertConfig, small: BertConfig, fields: dict[str, Any], discriminator: Path, generator: Path
) -> ElectraConfig:
    """The configuration of both parts; UserError where they do not belong together."""
    try:
        whole = ElectraConfig(**fields, generator_size=small.d_model / config.d_model)
    except ValueError as error:
        raise UserError(f"{generator}: is no generator of {discriminator}: {error}") from None
    if whole.generator() != dataclasses.replace(small, pooler=False, sentence_head=False):
        raise UserError(
            f"{generator}: is no generator of {discriminator}: with its width, {small.heads} heads and d_ff "
            f"{small.d_ff} must be {whole.generator().heads} and {whole.generator().d_ff}, and all else the same"
        )
    return whole


def write(
    model: Bert | BertPretraining | Electra, folder: Path, *, vocabulary: Mapping[str, int | None] | None = None
) -> None:
    """Write what transformers' from_pretrained() loads: BertModel, BertForPreTraining (or BertForMaskedLM where there
    is no sentence head) and ALBERT's; of ELECTRA discriminator/ and generator/.

    vocabulary: config.json's fields of special tokens, such as {"pad_token_id": 0}. Raises UserError for a model that
    transformers has not: ALBERT that shares a part of its layers.
    """
    if isinstance(model, Electra):
        for part in PARTS:
            write_part(model, part, folder / part, vocabulary=vocabulary)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, BertPretraining):
        _write(_kind(model.body), model.body, model.masked, model.sentence, folder, vocabulary)
    else:
        _write(_kind(model), model, None, None, folder, vocabulary)


def write_part(model: Electra, part: str, folder: Path, *, vocabulary: Mapping[str, int | None] | None = None) -> None:
    """Write one of PARTS of an ELECTRA: ElectraForPreTraining, or the generator as ElectraForMaskedLM."""
    folder.mkdir(parents=True, exist_ok=True)
    if part == "discriminator":
        _write("electra", model.discriminator, model.replaced, None, folder, vocabulary)
    else:
        _write("electra", model.generator, model.masked, None, folder, vocabulary)


# ------------------------------------------------------------------------------------------------------------ reading

_KINDS = ("weight", "bias")


def _read(folder: Path) -> tuple[_Family, BertConfig, dict[str, Tensor]]:
    path = folder / "config.json"
    given = read_json(path)
    kind = given.get("model_type")
    if kind not in _FAMILIES:
        raise UserError(f"{path}: is of a model of type {kind!r}: {', '.join(_FAMILIES)} can be read")
    config, weights = _config(given, path), read_tensors(folder)
    family = _FAMILIES[kind]
    if f"{family.prefix}{_EMBEDDINGS['embeddings.word.weight']}" not in weights:  # the bare body has no prefix
        heads = tuple(
            name for name in weights if name.startswith(("cls.", "predictions.", "sop_", "generator_", "disc"))
        )
        weights = {name if name in heads else family.prefix + name: each for name, each in weights.items()}
    # what TensorFlow called gamma and beta
    renamed = {name.replace("gamma", "weight").replace("beta", "bias"): each for name, each in weights.items()}
    return family, config, renamed


def _config(given: Mapping[str, Any], path: Path) -> BertConfig:
    """Our configuration for Hugging Face's; UserError for what we have not."""
    refused = (
        ("is_decoder", (None, False)),
        ("add_cross_attention", (None, False)),
        ("inner_group_num", (None, 1)),
        ("tie_word_embeddings", (None, True)),
        ("position_embedding_type", (None, "absolute")),
    )
    for name, allowed in refused:
        if given.get(name) not in allowed:
            raise UserError(f"{path}: {name} {given[name]} is not supported")
    if given.get("hidden_act", "gelu") not in _ACTIVATIONS:
        raise UserError(f"{path}: hidden_act {given['hidden_act']} is not supported: {', '.join(_ACTIVATIONS)} are")
    albert = given["model_type"] == "albert"
    layers = given.get("num_hidden_layers")
    groups = given.get("num_hidden_groups", 1) if albert else layers
    if groups not in (1, layers):
        raise UserError(f"{path}: num_hidden_groups {groups} is not supported: 1 or {layers}, one a layer, are")
    try:
        return (AlbertConfig if albert else BertConfig)(
            vocab_size=given["vocab_size"],
            d_model=given["hidden_size"],
            heads=given["num_attention_heads"],
            d_ff=given["intermediate_size"],
            layers=layers,  # type: ignore[arg-type]
            embedding_size=given.get("embedding_size"),
            share="all" if groups == 1 and albert else "none",
            activation=_ACTIVATIONS[given.get("hidden_act", "gelu")],  # type: ignore[arg-type]
            dropout=given.get("hidden_dropout_prob", 0.1),
            attention_dropout=given.get("attention_probs_dropout_prob", 0.1),
            layer_norm_eps=given.get("layer_norm_eps", 1e-12),
            max_length=given["max_position_embeddings"],
            segments=given.get("type_vocab_size", 2),
            init_std=given.get("initializer_range", 0.02),
            pad_id=given.get("pad_token_id") or 0,
        )
    except KeyError as error:
        raise UserError(f"{path}: has no {error.args[0]}: it is cut off; copy it anew") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None


def _has(weights: Mapping[str, Tensor], family: _Family, name: str) -> bool:
    return bool(name) and f"{family.prefix}{name}.weight" in weights


class _Reader:
    """Puts another tool's tensors into a model."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        self.folder, self.weights = folder, weights

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Mapping[str, str]) -> None:
        """Fill the parameters that names lists; of in_proj, the three that theirs are joined from."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for ours, theirs in names.items():
            parameter = parameters[ours]
            tensor = torch.cat([self._take(name) for name in _parts(theirs)])
            if tensor.shape != parameter.shape:
                raise UserError(
                    f"{self.folder}: {theirs} is {tuple(tensor.shape)}, where its config.json says "
                    f"{tuple(parameter.shape)}: copy both from one model"
                )
            parameter.copy_(tensor)

    def _take(self, name: str) -> Tensor:
        if name not in self.weights:
            raise UserError(f"{self.folder}: its weights have no {name}: they are cut off, or of another architecture")
        return self.weights[name]


def _parts(theirs: str) -> list[str]:
    """Their names of a parameter; `...{query,key,value}.weight` are three."""
    if "*" not in theirs:
        return [theirs]
    return [theirs.replace("*", part) for part in ("query", "key", "value")]


def _body_names(body: Bert, family: _Family) -> Iterable[tuple[str, str]]:
    """Our parameters of a body and theirs; a shared one under its first name."""
    for ours, theirs in _EMBEDDINGS.items():
        for kind in ("",) if ours.endswith("weight") else (".weight", ".bias"):
            yield ours + kind, family.prefix + theirs + kind
    pairs = [("pooler", family.pooler)] if body.pooler is not None else []
    if body.embedding_projection is not None:
        pairs.append(("embedding_projection", family.projection))
    for ours, theirs in pairs:
        for kind in _KINDS:
            yield f"{ours}.{kind}", f"{family.prefix}{theirs}.{kind}"
    for number in range(1 if body.config.share == "all" else body.config.layers):
        layer = family.prefix + family.layer.format(number)
        for ours, theirs in family.names.items():
            for kind in _KINDS:
                joint = ours.endswith("in_proj")
                name = f"{ours}_{kind}" if joint else f"{ours}.{kind}"
                yield f"encoder.layers.{number}.{name}", f"{layer}{theirs}{'*' if joint else ''}.{kind}"


def _masked_names(family: _Family) -> Iterable[tuple[str, str]]:
    transform, norm, _, bias = family.masked
    for ours, theirs in (("transform", transform), ("norm", norm)):
        for kind in _KINDS:
            yield f"{ours}.{kind}", f"{theirs}.{kind}"
    yield "bias", bias


# ------------------------------------------------------------------------------------------------------------ writing


def _write(
    kind: str, body: Bert, head: MaskedHead | ReplacedHead | None, sentence: nn.Linear | None, folder: Path,
    vocabulary: Mapping[str, int | None] | None,
) -> None:  # fmt: skip
    from safetensors.torch import save

    config, family = body.config, _FAMILIES[kind]
    if kind == "albert" and config.share not in ("all", "none"):
        raise UserError(f"share {config.share}: transformers' ALBERT shares all of its layers or none")
    if kind == "albert" and body.embedding_projection is None:
        raise UserError("transformers' ALBERT always maps its embeddings to d_model: this one has none of that width")
    tensors = dict(_their_tensors(body, _body_names(body, family)))
    if isinstance(head, MaskedHead):
        tensors |= _their_tensors(head, _masked_names(family))
        tensors[family.masked[2]] = body.embeddings.word.weight
        if kind != "electra":  # whose bias has the decoder's own name
            tensors[f"{family.masked[2].removesuffix('weight')}bias"] = head.bias
    elif head is not None:
        tensors |= _their_tensors(head, ((f"{o}.{k}", f"{t}.{k}") for o, t in _REPLACED.items() for k in _KINDS))
    if sentence is not None:
        tensors |= _their_tensors(sentence, ((k, f"{family.sentence}.{k}") for k in _KINDS))
    if head is None:
        tensors = {name.removeprefix(family.prefix): each for name, each in tensors.items()}
    plain = {name: each.detach().float().cpu().contiguous().clone() for name, each in tensors.items()}
    write_file(folder / "model.safetensors", save(plain, {"format": "pt"}))
    described = _their_config(config, kind, _architecture(kind, head, sentence)) | dict(vocabulary or {})
    write_file(folder / "config.json", (json.dumps(described, indent=2) + "\n").encode())


def _kind(body: Bert) -> str:
    """Which of their models computes what a body does."""
    if isinstance(body.config, AlbertConfig):
        return "albert"
    return "bert" if body.embedding_projection is None else "electra"


def _architecture(kind: str, head: nn.Module | None, sentence: nn.Linear | None) -> str:
    name = {"bert": "Bert", "albert": "Albert", "electra": "Electra"}[kind]
    if head is None:
        return f"{name}Model"
    return f"{name}For{'PreTraining' if sentence is not None or isinstance(head, ReplacedHead) else 'MaskedLM'}"


def _their_tensors(module: nn.Module, names: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    for ours, theirs in names:
        parts = _parts(theirs)
        tensors |= dict(zip(parts, parameters[ours].chunk(len(parts))))
    return tensors


def _their_config(config: BertConfig, kind: str, architecture: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "model_type": kind,
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.d_ff,
        "hidden_act": _THEIR_ACTIVATIONS[config.activation],
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.segments,
        "initializer_range": config.init_std,
        "layer_norm_eps": config.layer_norm_eps,
        "pad_token_id": config.pad_id,
        "tie_word_embeddings": True,
    }
    if kind != "bert":
        described["embedding_size"] = config.embedding_width
    if kind == "albert":
        described |= {"num_hidden_groups": 1 if config.share == "all" else config.layers, "inner_group_num": 1}
        described["classifier_dropout_prob"] = config.dropout
    return described
