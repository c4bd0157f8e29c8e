"""Import of CTranslate2's model directories; does not need CTranslate2.

https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/model_spec.py       ModelSpec._serialize

model.bin, little-endian: version, name and revision of the specification; number of variables, and for each its name,
rank, shape, type, size in bytes and data; number of aliases, and for each the alias and the variable's name.
"""

import io
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.convert.channels import pairs_from_halves
from fasttfm.convert.ctranslate2 import NAMES
from fasttfm.convert.exchange import (
    Arrangement,
    Model,
    fitting_tokenizer,
    language_token,
    learned_positions,
    refuse_other_corpus,
    shapes,
    special_id,
    with_tables,
)
from fasttfm.convert.names import TheirWeights
from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import UserError
from fasttfm.reference import positional_encoding
from fasttfm.store.weights import refuse_nonfinite
from fasttfm.system.files import read_content, read_json
from fasttfm.system.folders import settled
from fasttfm.system.parsing import field

_SIDES = ("encoder", "decoder")
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16, 5: np.uint16}
_QUANTIZED = (np.int8, np.int16)
_BFLOAT16 = 5
_VERSIONS = (5, 6)
_ACTIVATIONS = {0: "relu", 1: "gelu_tanh", 2: "silu", 3: "gelu"}
_TOLERANCE = 1e-3
"""For sinusoids: error of position times frequency in float32, at positions up to some thousands."""
_BFLOAT16_TOLERANCE = 4e-3
"""For sinusoids that were rounded to bfloat16."""
_SETTINGS = ("add_source_eos", "bos_token", "decoder_start_token", "eos_token", "layer_norm_epsilon", "unk_token")
"""Fields of config.json that are read or have no effect here."""
_VALUES = ("num_heads", "pre_norm", "activation", "scale_embeddings", "encodings", "start_from_zero_embedding")
"""Variables other than weights that are read, on either side."""
_OF_BOTH_SIDES = ("num_heads", "pre_norm", "activation", "encodings")
"""Variables that must exist on both sides or neither, with equal values (except encodings)."""
_WITHOUT_EFFECT = ("alibi_use_positive_positions", "scale_alibi", "embeddings_merge", "alignment_heads",
                   "alignment_layer", "weight_scale")  # fmt: skip
"""Variables without effect in a model without ALiBi and with one embedding, or used only for alignments."""
_WEIGHTS = ("weight", "bias", "gamma", "beta")
_OFF = ("alibi", "multi_query_attention")
"""Variables that must be zero."""
_LANGUAGE = re.compile(r"__[a-z]{2,3}__|[a-z]{3}_[A-Z][a-z]{3}")
"""Language tokens of M2M-100 (__en__) and NLLB (eng_Latn)."""
_SENTENCEPIECE = {
    "source": ("source.spm", "sentencepiece.bpe.model", "spm.src.model", "spm.model", "sentencepiece.model"),
    "target": ("target.spm", "sentencepiece.bpe.model", "spm.tgt.model", "spm.model", "sentencepiece.model"),
}


def read(folder: Path, **languages: Any) -> Model:
    """Read a directory of CTranslate2's converters with its SentencePiece models.

    Raises UserError for a file that is missing, truncated or of another architecture.
    """
    settled(folder)
    variables = _read_variables(folder / "model.bin")
    settings = read_json(folder / "config.json")
    words = {side: vocabulary(folder, side) for side in ("source", "target")}
    arrangements = {side: _arrangement(words[side], variables, settings, folder, side) for side in words}
    joint = words["source"] == words["target"]
    try:
        config, halved = _config(variables, settings, joint, arrangements)
        given = _dotted(variables, folder / "model.bin")
    except KeyError as error:
        raise UserError(f"{folder / 'model.bin'}: has no {error.args[0]}: it is of another architecture") from None
    except (UserError, ValueError) as error:
        raise UserError(f"{folder}: {error}") from None
    tables = given["encoder.embeddings_0.weight"], given["decoder.embeddings.weight"]
    output, bias = given["decoder.projection.weight"], given.get("decoder.projection.bias")
    layers = given.ours(NAMES.parameters(config), shapes(config))
    given.refuse_rest()
    notes: list[str] = []
    if config.positions is not None:
        learned, notes = learned_positions(_encodings(variables))
        layers |= learned
    config, weights = with_tables(
        config, layers, list(arrangements.values()), tables, output, bias, path=folder / "model.bin"
    )
    refuse_nonfinite(weights, folder / "model.bin")
    ends = _ends(variables, settings)
    source, target = (
        _tokenizer(folder, side, each.pieces(words[side]), languages.get(f"{side}_language"), ends=ends)
        for side, each in arrangements.items()
    )
    refuse_other_corpus(folder, (source, target))
    return Model(
        config,
        pairs_from_halves(weights, config.d_model) if halved else weights,
        (source, target),
        DecodingConfig(beam=2, length_penalty="power", alpha=1.0, early_stopping=True, allow_unk=True),
        notes=(*notes, *_notes(variables, settings)),
    )


def _read_variables(path: Path) -> dict[str, np.ndarray]:
    """Read all variables and aliases of model.bin by name; integer weights are not dequantized."""
    reader = _Reader(read_content(path, "is missing: give the directory that a converter of CTranslate2 wrote"))
    try:
        version = reader.number("I")
        if version not in _VERSIONS:
            raise UserError(f"{path}: is not a model of CTranslate2 of version {_VERSIONS[0]} or {_VERSIONS[1]}")
        name = reader.text()
        if name != "TransformerSpec":
            raise UserError(f"{path}: is a {name}: only encoder-decoder Transformers (TransformerSpec) can be imported")
        reader.number("I")  # the specification's revision
        variables = {}
        for _ in range(reader.number("I")):
            name = reader.text()
            if name in variables:
                raise ValueError(f"has {name} twice")
            variables[name] = reader.array()
        for _ in range(reader.number("I")):
            alias, name = reader.text(), reader.text()
            variables[alias] = variables[name]
            if f"{name}_scale" in variables:  # the scale of a quantized weight has no alias of its own
                variables.setdefault(f"{alias}_scale", variables[f"{name}_scale"])
        if reader.read(1):
            raise ValueError("it has bytes after its end")
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: is truncated or damaged ({error}): copy it again") from None
    return variables


class _Reader(io.BytesIO):
    """Reads struct-packed values in order; ValueError at the end of the data."""

    def number(self, kind: str) -> int:
        (value,) = struct.unpack(f"<{kind}", self._bytes(struct.calcsize(kind)))
        return value

    def text(self) -> str:
        return self._bytes(self.number("H"))[:-1].decode()

    def array(self) -> np.ndarray:
        shape = [self.number("I") for _ in range(self.number("B"))]
        kind = self.number("B")
        if kind not in _TYPES:
            raise ValueError(f"a variable is of the unknown type {kind}")
        values = np.frombuffer(self._bytes(self.number("I")), _TYPES[kind])
        if kind == _BFLOAT16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(shape)

    def _bytes(self, size: int) -> bytes:
        part = self.read(size)
        if len(part) < size:
            raise ValueError("it ends early")
        return part


def vocabulary(folder: Path, side: str) -> list[str]:
    """Return the pieces of "source" or "target"; UserError for a damaged file."""
    names = ("shared_vocabulary.json", f"{side}_vocabulary.json")
    path = next((folder / name for name in names if (folder / name).exists()), folder / names[1])
    pieces = read_json(path, list)
    if not all(isinstance(piece, str) for piece in pieces):
        raise UserError(f"{path}: has entries that are not strings: copy it again")
    if len(set(pieces)) < len(pieces):
        twice = next(piece for piece in pieces if pieces.count(piece) > 1)
        raise UserError(f"{path}: has {twice!r} twice: copy it again")
    return pieces


def _arrangement(
    pieces: list[str], variables: Mapping[str, Any], settings: Mapping[str, Any], folder: Path, side: str
) -> Arrangement:
    where = str(folder / "config.json")
    usual = {"unk": "<unk>", "eos": "</s>"}
    names = {name: field(settings, f"{name}_token", str, where, token) for name, token in usual.items()}
    unk, eos = (special_id(pieces, names[name], folder / f"{side}_vocabulary.json") for name in ("unk", "eos"))
    pad = next((pieces.index(each) for each in ("<blank>", "<pad>") if each in pieces), None)
    start: int | None = None
    if not variables.get("decoder/start_from_zero_embedding", 0):
        name = _start_token(settings, where)
        unused = side == "source" and name not in pieces  # sources do not begin with a start token
        start = eos if unused else special_id(pieces, name, folder / f"{side}_vocabulary.json")
    return Arrangement(len(pieces), pad=pad, unk=unk, start=start, eos=eos)


def _ends(variables: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether sources end with the end token.

    If config.json does not say so, the start token decides: a model that starts with <s> is OpenNMT's, whose sources
    have no end token; in other models the tokenizer adds it.
    """
    ended = field(settings, "add_source_eos", bool, "config.json", False)
    if ended or variables.get("decoder/start_from_zero_embedding", 0):
        return True
    return _start_token(settings, "config.json") in (settings.get("eos_token", "</s>"), "<pad>")


def _notes(variables: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the assumptions of the import."""
    yield "searches with CTranslate2's defaults: beam 2, length penalty 1"
    if not _ends(variables, settings):
        yield "sources have no end token, as in OpenNMT: if these have one, write add_source_eos true in config.json"
    elif not settings.get("add_source_eos"):
        yield "sources end with the end token, which config.json leaves to the tokenizer"
    if "decoder/position_encodings/encodings" not in variables:
        yield "has no table of positions: CTranslate2's sinusoids, which start at 1, were used"
    types = sorted({str(values.dtype) for name, values in variables.items() if name.endswith("/weight")} - {"float32"})
    if types:
        yield f"weights were converted from {', '.join(types)} to float32"


def _start_token(settings: Mapping[str, Any], where: str) -> str:
    """Return the token that starts a translation."""
    if "decoder_start_token" in settings and settings["decoder_start_token"] is None:
        raise UserError(f"{where}: decoder_start_token is null: write there the token that translations begin with")
    return field(settings, "decoder_start_token", str, where, field(settings, "bos_token", str, where, "<s>"))


def _config(
    variables: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    joint: bool,
    arrangements: Mapping[str, Arrangement],
) -> tuple[TransformerConfig, bool]:
    """Return the configuration, and whether the positions are the paper's sinusoids with all sines first."""
    names = ("encoder/embeddings_0", "decoder/embeddings", "decoder/projection")
    source, target, output = (_table(variables, name) for name in names)
    for name, table in zip(names, (source, target, output)):
        if table.ndim != 2:
            raise UserError(f"{name}/weight is {table.shape}: a matrix is needed")
    width = target.shape[1]
    _refuse_others(variables, settings)
    for side in _SIDES:
        scale = _embedding_scale(variables.get(f"{side}/scale_embeddings"), width)
        if abs(scale - width**0.5) > 1e-2:
            raise UserError(f"the {side}'s embeddings are scaled by {scale:g}: only sqrt(d_model) is supported")
        if f"{side}/layernorm_embedding/gamma" in variables:
            raise UserError("a LayerNorm behind the embedding (BART) is not supported")
    layers = [sum(f"{side}/layer_{i}/ffn/linear_0/bias" in variables for i in range(999)) for side in _SIDES]
    activation = int(variables.get("decoder/activation", np.int8(0)))
    if activation not in _ACTIVATIONS:
        raise UserError(f"activation {activation} is not supported: ReLU, GELU and Swish are")
    kind, first, halved, length = _positions(_encodings(variables), width)
    shared = "none"
    if np.array_equal(output, target):
        shared = "all" if joint and np.array_equal(source, target) else "decoder"
    pre_norm = bool(variables.get("decoder/pre_norm", np.int8(1)))
    config = TransformerConfig(
        vocab_size=len(arrangements["target"]),
        source_vocab_size=None if shared == "all" else len(arrangements["source"]),
        d_model=width,
        heads=int(variables["decoder/num_heads"]),
        d_ff=variables["decoder/layer_0/ffn/linear_0/bias"].size,
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        norm_first=pre_norm,
        final_norm="decoder/layer_norm/gamma" in variables,
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        layer_norm_eps=field(settings, "layer_norm_epsilon", float, "config.json", 1e-5),
        positional_encoding=kind,  # type: ignore[arg-type]
        first_position=first,
        share_embeddings=shared,  # type: ignore[arg-type]
        max_length=length,
    )
    return config, halved


def _refuse_others(variables: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> None:
    """Raise UserError for variables and fields of config.json that describe an unsupported architecture."""
    for name, value in settings.items():
        if name not in _SETTINGS and value:
            raise UserError(f"config.json has {name} {value!r}, which is not supported")
    for name, values in variables.items():
        side, _, rest = name.partition("/")
        kind = name.rpartition("/")[2]
        if kind in _OFF and values.any():
            raise UserError(f"{name} is not zero, which is not supported")
        if kind not in (*_VALUES, *_WITHOUT_EFFECT, *_OFF, *_WEIGHTS):
            raise UserError(f"has {name}, which is not supported: it is of another architecture")
        if kind in _VALUES and kind != "encodings" and values.size != 1:
            raise UserError(f"{name} has {values.size} numbers: one is needed")
        if kind == "weight_scale" and variables[name.removesuffix("_scale")].dtype not in _QUANTIZED:
            raise UserError(f"has {name}, but its weight is not quantized: it is of another architecture")
        if kind in _OF_BOTH_SIDES and (side == "encoder" or f"encoder/{rest}" not in variables):
            other = f"{'decoder' if side == 'encoder' else 'encoder'}/{rest}"
            if other not in variables:
                raise UserError(f"has {name} but no {other}: sides that differ are not supported")
            if kind != "encodings" and not np.array_equal(values, variables[other]):
                raise UserError(f"{name} and {other} differ, which is not supported")


def _embedding_scale(variable: np.ndarray | None, width: int) -> float:
    """Return the scale of embeddings: int8 switches sqrt(d_model) on or off, other types are the scale itself."""
    if variable is None or (variable.dtype == np.int8 and variable):
        return width**0.5
    return 1.0 if variable.dtype == np.int8 else float(variable)


def _encodings(variables: Mapping[str, np.ndarray]) -> list[Tensor]:
    """Return the position tables (L, d) of encoder and decoder, if the model has any."""
    tables = [variables.get(f"{side}/position_encodings/encodings") for side in _SIDES]
    return [torch.from_numpy(table.astype(np.float32)) for table in tables if table is not None]


def _positions(tables: list[Tensor], width: int) -> tuple[str, int, bool, int]:
    """Return (variant, first position, all sines first, rows); tables other than sinusoids count as learned."""
    if not tables:
        return "tensor2tensor", 1, False, 1024  # computed by CTranslate2, starting at 1
    for table in tables:
        if table.dim() != 2 or table.shape[1] != width or not len(table):
            raise UserError(f"position_encodings/encodings are {tuple(table.shape)}: (positions, {width}) is needed")
    table = tables[1]
    if not torch.equal(*tables):
        return "learned", 0, False, min(map(len, tables))
    rows = min(len(table), 64)
    tolerance = _BFLOAT16_TOLERANCE if torch.equal(table, table.bfloat16().float()) else _TOLERANCE
    for first in range(4):
        for kind in ("paper", "tensor2tensor"):
            ours = positional_encoding(rows, width, kind, first=first, device="cpu")
            halves = torch.cat([ours[:, 0::2], ours[:, 1::2]], dim=1)
            for halved, candidate in ((False, ours), (True, halves)):
                if (candidate - table[:rows]).abs().max() < tolerance and not (halved and kind != "paper"):
                    return kind, first, halved, len(table)
    return "learned", 0, False, len(table)


def _table(variables: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return a weight as float32, dequantized by its scale (one per row, or one)."""
    weight = variables[f"{name}/weight"]
    if not (weight.dtype in _QUANTIZED or weight.dtype.kind == "f"):
        raise UserError(f"{name}/weight is {weight.dtype}: a floating-point type, int8 or int16 is needed")
    if weight.dtype in _QUANTIZED:
        scale = variables[f"{name}/weight_scale"].astype(np.float32)
        if scale.shape not in ((), (1,), weight.shape[:1]):
            raise UserError(f"{name}/weight_scale is {scale.shape}, its weight {weight.shape}: one per row is needed")
        return weight.astype(np.float32) / (scale[:, None] if scale.ndim else scale)
    return weight.astype(np.float32)


def _dotted(variables: Mapping[str, np.ndarray], path: Path) -> TheirWeights:
    """Return the weights among the variables as float32, by the names in NAMES."""
    weights = {}
    for name, values in variables.items():
        module, _, kind = name.rpartition("/")
        if kind == "weight":
            values = _table(variables, module)
        elif kind not in _WEIGHTS:
            continue
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)
        weights[f"{module.replace('/', '.')}.{kind}"] = torch.from_numpy(values.astype(np.float32))
    return TheirWeights(path, weights)


def _tokenizer(folder: Path, side: str, pieces: list[str], language: str | None, *, ends: bool) -> Tokenizer:
    languages = {piece.strip("_"): piece for piece in pieces if _LANGUAGE.fullmatch(piece)}
    if language is not None and not languages:
        raise UserError(f"{folder}: --{side}-language {language}: this model has no language tokens: leave it out")
    prefix = [language_token(languages, side, language)] if languages else []
    codes = folder / f"{side}.codes"  # written by our export
    if codes.exists():
        return MosesTokenizer.load(codes, pieces=pieces, ends=ends)
    path = next((folder / name for name in _SENTENCEPIECE[side] if (folder / name).exists()), None)
    if path is None:
        raise UserError(
            f"{folder}: has no SentencePiece model: CTranslate2's converters do not copy it; add it as "
            f"{_SENTENCEPIECE[side][0]}"
        )
    vocabulary = Vocabulary(pieces=pieces, prefix=prefix, silent=[*languages.values()], codes=not prefix, ends=ends)
    return fitting_tokenizer(path, vocabulary)
