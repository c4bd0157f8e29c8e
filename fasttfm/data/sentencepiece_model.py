"""Content of a SentencePiece model: its kind, and every piece with score and type.

Sampling that a seed fixes (sampling.py), and with it exact resuming, must know whether merges or a lattice make the
segmentations, and which pieces may be taken apart. SentencePiece's Python answers neither: it has no call for the kind
of a model, nor for user-defined symbols, and its own reader of model files needs the protobuf package. So the fields
are read from the file, a protocol buffer (sentencepiece_model.proto).
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, USER_DEFINED, UNUSED, BYTE = 1, 4, 5, 6  # ModelProto.SentencePiece.Type


def read_model(model: bytes) -> tuple[int, list[tuple[str, float, int]]]:
    """The kind of model (UNIGRAM, BPE) and (piece, score, type) of each id."""
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
    """Changes that a model makes to a text before it cuts it."""

    rules: bool
    """Whether it replaces characters."""
    adds_space: bool
    """Whether a space comes before a line that has something."""
    drops_spaces: bool
    """Whether repeated spaces become one, and those at the ends of a line go."""


def read_normalizer(model: bytes) -> Normalizer:
    """The normalizer of a model (NormalizerSpec)."""
    spec = next((dict(_fields(value)) for number, value in _fields(model) if number == 3), {})
    return Normalizer(bool(spec.get(2)), bool(spec.get(3, True)), bool(spec.get(4, True)))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field: an int for varints, bytes for the rest."""
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
