"""Reads SentencePiece model files: model type, pieces with score and type, normalizer.

Reproducible sampling (sampling.py) must know whether a model is BPE or unigram and which pieces may be split.
SentencePiece's Python API exposes neither the model type nor user-defined symbols, and its model file reader needs the
protobuf package. So this module parses the protocol buffer (sentencepiece_model.proto) directly.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, USER_DEFINED, UNUSED, BYTE = 1, 4, 5, 6  # ModelProto.SentencePiece.Type


def read_model(model: bytes) -> tuple[int, list[tuple[str, float, int]]]:
    """The model type (UNIGRAM, BPE, ...), and (piece, score, type) by id."""
    kind, pieces = UNIGRAM, []
    for number, value in _fields(model):
        if number == 1:
            fields = dict(_fields(value))
            score = struct.unpack("<f", fields.get(2, b"\0\0\0\0"))[0]
            pieces.append((fields.get(1, b"").decode(), score, fields.get(3, NORMAL)))
        elif number == 2:
            kind = dict(_fields(value)).get(3, UNIGRAM)
    return kind, pieces


class Normalizer(NamedTuple):
    """A model's preprocessing of text."""

    rules: bool
    """Whether it replaces characters."""
    adds_space: bool
    """Whether it prepends a space to non-empty lines."""
    drops_spaces: bool
    """Whether it removes repeated, leading and trailing spaces."""


def read_normalizer(model: bytes) -> Normalizer:
    """The normalizer of a model (NormalizerSpec)."""
    spec = next((dict(_fields(value)) for number, value in _fields(model) if number == 3), {})
    return Normalizer(bool(spec.get(2)), bool(spec.get(3, True)), bool(spec.get(4, True)))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field: int for varints, bytes for all others."""
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = message[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while offset < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}[tag & 7] if tag & 7 != 2 else varint()
        yield tag >> 3, message[offset : offset + size]
        offset += size
