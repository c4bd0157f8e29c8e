"""Word alignments from attention between tokens, in Pharaoh format.

Each target token is linked to the source word with the largest attention, summed over the word's tokens; two words are
linked if a token of the one is linked to the other (Garg et al. 2019, section 4.1; fairseq's --print-alignment).
End-of-sentence is not a word. Attention without a target rests on punctuation, so words with letters are linked only to
such words, and a punctuation mark to an equal one in the source.
"""

import re
from collections.abc import Sequence

from torch import Tensor

WORDS = re.compile(r"\S+")
"""Words of the Pharaoh format: separated by white space."""

Span = tuple[int, int]
Links = tuple[tuple[int, int], ...]


def word_links(
    attention: Tensor, source: str, source_tokens: Sequence[Span], target: str, target_tokens: Sequence[Span]
) -> Links:
    """Pairs (source word, target word), counted from 0, ascending.

    attention: (L, S), at least one row per target token and one column per source token. Token spans are in characters
    of source and of target, as given by Tokenizer.spans() and decoded_spans().
    """
    of_source = _words_of(source_tokens, source)[: attention.shape[1]]
    words = sorted({word for word in of_source if word is not None})
    if not words:
        return ()
    columns = {word: column for column, word in enumerate(words)}
    summed = attention.new_zeros(len(attention), len(words))
    for token, word in enumerate(of_source):
        if word is not None:
            summed[:, columns[word]] += attention[:, token]
    texts = [WORDS.findall(source)[word] for word in words]
    of_target, target_texts = _words_of(target_tokens, target), WORDS.findall(target)
    links = set()
    for weights, word in zip(summed, of_target):
        if word is not None:
            fitting = _fitting(target_texts[word], texts)
            links.add((words[fitting[int(weights[fitting].argmax())]], word))
    return tuple(sorted(links))


def _fitting(text: str, sources: Sequence[str]) -> list[int]:
    """Indices of source words of the same kind as text, or all if there are none."""
    if _is_word(text):
        matches = [index for index, each in enumerate(sources) if _is_word(each)]
    else:
        matches = [index for index, each in enumerate(sources) if each == text]
    return matches or list(range(len(sources)))


def _is_word(text: str) -> bool:
    return any(character.isalnum() for character in text)


def pharaoh(links: Links) -> str:
    """Links as a Pharaoh line: `0-0 1-2`, source word before target word."""
    return " ".join(f"{source}-{target}" for source, target in links)


def _words_of(tokens: Sequence[Span], text: str) -> list[int | None]:
    """The word that each token begins in, after leading spaces; None if there is none."""
    word_at: list[int | None] = [None] * (len(text) + 1)
    for number, match in enumerate(WORDS.finditer(text)):
        word_at[match.start() : match.end()] = [number] * (match.end() - match.start())
    numbers = []
    for begin, end in tokens:
        letters = [index for index in range(begin, max(end, begin + 1)) if word_at[min(index, len(text))] is not None]
        numbers.append(word_at[letters[0]] if letters else None)
    return numbers
