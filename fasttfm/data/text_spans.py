"""Where each token of a text stands in it, for every kind of tokenizer."""

from __future__ import annotations

from typing import Any

from fasttfm.data.text_tokenizer import NEWLINE, ByteTokenizer, ImportedTokenizer, PieceTokenizer
from fasttfm.data.tokenizer import Tokenizer


def encode_with_spans(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a text, and of each where its characters begin and end, spaces before it included.

    tokenizer: a TextTokenizer, or a Tokenizer for text of one line. A character that is spelt in bytes belongs to the
    last of them; the others begin and end where it begins.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text), tokenizer.spans(text)
    if isinstance(tokenizer, ByteTokenizer):
        sizes = [len(character.encode()) for character in text]
        spans = [(i, i + (byte == size - 1)) for i, size in enumerate(sizes) for byte in range(size)]
        return tokenizer.encode(text), spans
    if isinstance(tokenizer, ImportedTokenizer):
        return tokenizer.encode_with_spans(text)
    assert isinstance(tokenizer, PieceTokenizer)
    ids: list[int] = []
    spans, begin = [], 0
    for number, line in enumerate(text.split(NEWLINE)):
        if number:
            ids.append(tokenizer.newline)
            spans.append((begin - 1, begin))
        ids += tokenizer.tokenizer.encode(line)
        spans += [(begin + first, begin + last) for first, last in tokenizer.tokenizer.spans(line)]
        begin += len(line) + 1
    return ids, spans
