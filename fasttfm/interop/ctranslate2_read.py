"""Reads a model directory of CTranslate2, without CTranslate2.

https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/model_spec.py       ModelSpec._serialize

model.bin, little-endian: version, name of the specification, its revision; the number of variables, and each one's
name, number of dimensions, dimensions, type, number of bytes, bytes; the number of aliases, and each one's two names.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.checkpoints.weights import refuse_what_is_no_number
from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import UserError
from fasttfm.files import read_json, unreadable
from fasttfm.interop.channels import pairs_from_halves
from fasttfm.interop.ctranslate2 import NAMES
from fasttfm.interop.exchange import Arrangement, Model, number, numbered_tokenizer, with_tables
from fasttfm.interop.names import TheirWeights
from fasttfm.reference import positional_encoding

_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16, 5: np.uint16}
_BFLOAT16 = 5
_VERSIONS = (5, 6)
_ACTIVATIONS = {0: "relu", 1: "gelu_tanh", 2: "silu", 3: "gelu"}
_TOLERANCE = 1e-3
"""Of a sinusoid: position times a frequency in float32, for positions up to some thousands."""
_SENTENCEPIECE = {
    "source": ("source.spm", "sentencepiece.bpe.model", "spm.src.model", "spm.model", "sentencepiece.model"),
    "target": ("target.spm", "sentencepiece.bpe.model", "spm.tgt.model", "spm.model", "sentencepiece.model"),
}


def read(folder: Path, **languages: Any) -> Model:
    """The model of a directory of CTranslate2's converters, with the SentencePiece models that lie in it.

    Raises UserError for a file that is missing, cut off or of another architecture.
    """
    variables = _read_variables(folder / "model.bin")
    settings = read_json(folder / "config.json")
    words = {side: _vocabulary(folder, side) for side in ("source", "target")}
    arrangements = {side: _arrangement(words[side], variables, settings, folder, side) for side in words}
    joint = words["source"] == words["target"]
    try:
        config, halved = _config(variables, settings, joint, arrangements)
    except KeyError as error:
        raise UserError(f"{folder / 'model.bin'}: has no {error.args[0]}: it is of another architecture") from None
    given = _dotted(variables, folder / "model.bin")
    tables = given["encoder.embeddings_0.weight"], given["decoder.embeddings.weight"]
    output, bias = given["decoder.projection.weight"], given.get("decoder.projection.bias")
    layers = given.ours(NAMES.parameters(config))
    config, weights = with_tables(config, layers, list(arrangements.values()), tables, output, bias)
    refuse_what_is_no_number(weights, folder / "model.bin")
    tokenizers = [_tokenizer(folder, side, arrangements[side].pieces(words[side])) for side in ("source", "target")]
    return Model(
        config=config,
        weights=pairs_from_halves(weights, config.d_model) if halved else weights,
        source_tokenizer=tokenizers[0],
        target_tokenizer=tokenizers[1],
        decoding=DecodingConfig(beam=2, length_penalty="power", alpha=1.0, allow_unk=True),  # CTranslate2's defaults
    )


def _read_variables(path: Path) -> dict[str, np.ndarray]:
    """Every variable by name, aliases among them; of whole numbers as they are."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: is missing: give the directory that a converter of CTranslate2 wrote") from None
    except OSError as error:
        raise unreadable(path, error) from error
    reader = _Reader(content)
    try:
        version = reader.number("I")
        if version not in _VERSIONS:
            raise UserError(f"{path}: is no model of CTranslate2 of version {_VERSIONS[0]} or {_VERSIONS[1]}")
        name = reader.text()
        if name != "TransformerSpec":
            raise UserError(f"{path}: is a {name}: only encoder-decoder Transformers (TransformerSpec) can be imported")
        reader.number("I")  # the specification's revision
        variables = {}
        for _ in range(reader.number("I")):
            name = reader.text()
            variables[name] = reader.array()
        for _ in range(reader.number("I")):
            alias, name = reader.text(), reader.text()
            variables[alias] = variables[name]
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: is cut off or damaged ({error}): copy it anew") from None
    return variables


class _Reader(io.BytesIO):
    """Reads what struct packs, from the beginning on. ValueError at the end."""

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


def _vocabulary(folder: Path, side: str) -> list[str]:
    names = ("shared_vocabulary.json", f"{side}_vocabulary.json")
    path = next((folder / name for name in names if (folder / name).exists()), folder / names[1])
    pieces = read_json(path, list)
    if not all(isinstance(piece, str) for piece in pieces):
        raise UserError(f"{path}: holds something else than pieces: copy it anew")
    return pieces


def _arrangement(
    pieces: list[str], variables: Mapping[str, Any], settings: Mapping[str, Any], folder: Path, side: str
) -> Arrangement:
    names = {name: settings.get(f"{name}_token") or usual for name, usual in (("unk", "<unk>"), ("eos", "</s>"))}
    unk, eos = (number(pieces, names[name], folder / f"{side}_vocabulary.json") for name in ("unk", "eos"))
    pad = next((pieces.index(each) for each in ("<blank>", "<pad>") if each in pieces), None)
    start: int | None = None
    if not variables.get("decoder/start_from_zero_embedding", 0):
        name = settings.get("decoder_start_token") or settings.get("bos_token") or "<s>"
        start = pieces.index(name) if name in pieces else eos
    return Arrangement(len(pieces), pad=pad, unk=unk, start=start, eos=eos)


def _config(
    variables: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    joint: bool,
    arrangements: Mapping[str, Arrangement],
) -> tuple[TransformerConfig, bool]:
    """The configuration, and whether the sinusoids are the paper's with all sines first."""
    source, target = (_table(variables, name) for name in ("encoder/embeddings_0", "decoder/embeddings"))
    width = target.shape[1]
    scale = float(variables.get("decoder/scale_embeddings", np.float32(0)))
    if scale not in (1.0,) and abs(scale - width**0.5) > 1e-3:
        raise UserError(f"the embeddings are scaled by {scale:g}, which is not supported: only sqrt(d_model) is")
    for name in ("encoder/layernorm_embedding/gamma", "decoder/layernorm_embedding/gamma"):
        if name in variables:
            raise UserError("a LayerNorm behind the embedding (BART) is not supported")
    layers = [sum(f"{side}/layer_{i}/ffn/linear_0/bias" in variables for i in range(999)) for side in _SIDES]
    activation = int(variables.get("decoder/activation", np.int8(0)))
    if activation not in _ACTIVATIONS:
        raise UserError(f"activation {activation} is not supported: ReLU, GELU and Swish are")
    table = variables.get("decoder/position_encodings/encodings")
    encodings = None if table is None else torch.from_numpy(table.astype(np.float32))
    kind, first, halved, length = _positions(encodings, width)
    tied = joint and source.shape == target.shape and np.array_equal(source, target)
    output = _table(variables, "decoder/projection")
    if not (output.shape == target.shape and np.array_equal(output, target)):
        shared = "none"
    else:
        shared = "all" if tied else "decoder"
    pre_norm = bool(variables.get("decoder/pre_norm", np.int8(1)))
    config = TransformerConfig(
        vocab_size=len(arrangements["target"]),
        source_vocab_size=None if shared == "all" else len(arrangements["source"]),
        d_model=width,
        heads=int(variables["decoder/num_heads"]),
        d_ff=len(variables["decoder/layer_0/ffn/linear_0/bias"]),
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        norm_first=pre_norm,
        final_norm="decoder/layer_norm/gamma" in variables,
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        layer_norm_eps=settings.get("layer_norm_epsilon") or 1e-5,
        positional_encoding=kind,  # type: ignore[arg-type]
        first_position=first,
        share_embeddings=shared,  # type: ignore[arg-type]
        max_length=length,
    )
    return config, halved


_SIDES = ("encoder", "decoder")


def _positions(table: Tensor | None, width: int) -> tuple[str, int, bool, int]:
    """(variant, first position, whether the paper's have all sines first, rows) of a table; UserError for another."""
    if table is None:
        return "tensor2tensor", 1, False, 1024  # CTranslate2's own, which begin at 1
    rows = min(len(table), 64)
    for first in range(4):
        for kind in ("paper", "tensor2tensor"):
            ours = positional_encoding(rows, width, kind, first=first)
            halves = torch.cat([ours[:, 0::2], ours[:, 1::2]], dim=1)
            for halved, candidate in ((False, ours), (True, halves)):
                if (candidate - table[:rows]).abs().max() < _TOLERANCE and not (halved and kind != "paper"):
                    return kind, first, halved, len(table)
    raise UserError("its positions were trained or are of another kind: only sinusoids can be imported")


def _table(variables: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A weight in float32; whole numbers were multiplied by a scale, one a row or one for all."""
    weight = variables[f"{name}/weight"]
    if weight.dtype in (np.int8, np.int16):
        scale = variables[f"{name}/weight_scale"].astype(np.float32)
        return weight.astype(np.float32) / (scale[:, None] if scale.ndim else scale)
    return weight.astype(np.float32)


def _dotted(variables: Mapping[str, np.ndarray], path: Path) -> TheirWeights:
    """The weights among the variables in float32, by the names that NAMES has."""
    weights = {}
    for name, values in variables.items():
        module, _, kind = name.rpartition("/")
        if kind == "weight":
            values = _table(variables, module)
        elif kind not in ("bias", "gamma", "beta"):
            continue
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)
        weights[f"{module.replace('/', '.')}.{kind}"] = torch.from_numpy(values.astype(np.float32))
    return TheirWeights(path, weights)


def _tokenizer(folder: Path, side: str, pieces: list[str]) -> Tokenizer:
    path = next((folder / name for name in _SENTENCEPIECE[side] if (folder / name).exists()), None)
    if path is None:
        raise UserError(
            f"{folder}: has no SentencePiece model, which CTranslate2's converters do not copy: put it there as "
            f"{_SENTENCEPIECE[side][0]}"
        )
    return numbered_tokenizer(path, Vocabulary(pieces=pieces, prefix=[], codes=True))
