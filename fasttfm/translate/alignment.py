"""From attention between tokens to links between words, as Pharaoh lines show them.

Each token of the translation is linked to the word of the source that its attention, summed over the word's tokens, is
largest for; two words are linked when a token of the one is linked to the other (Garg et al. 2019, section 4.1;
fairseq's --print-alignment). End-of-sentence is not a word. Attention that has nothing to look at rests on punctuation,
so words of letters are linked with such, and a sign that the source has as well is linked with it.
"""

import re
from collections.abc import Sequence

from torch import Tensor

WORDS = re.compile(r"\S+")
"""Words as whoever reads Pharaoh lines counts them: what stands between white space."""

Span = tuple[int, int]
Links = tuple[tuple[int, int], ...]


def word_links(
    attention: Tensor, source: str, source_tokens: Sequence[Span], target: str, target_tokens: Sequence[Span]
) -> Links:
    """Pairs (source word, target word), counted from 0; rising.

    attention (L, S) with a row for each target token and a column for each source token at least; spans of tokens in
    characters of source and of target, as Tokenizer.spans and decoded_spans tell.
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
    """Places of the source words that a word may be linked with: of its kind, where there are any."""
    if _is_word(text):
        matches = [index for index, each in enumerate(sources) if _is_word(each)]
    else:
        matches = [index for index, each in enumerate(sources) if each == text]
    return matches or list(range(len(sources)))


def _is_word(text: str) -> bool:
    return any(character.isalnum() for character in text)


def pharaoh(links: Links) -> str:
    """Links as a line of text: `0-0 1-2`, source word before target word."""
    return " ".join(f"{source}-{target}" for source, target in links)


def _words_of(tokens: Sequence[Span], text: str) -> list[int | None]:
    """The word that each token begins in, after its spaces; None where there is none."""
    word_at: list[int | None] = [None] * (len(text) + 1)
    for number, match in enumerate(WORDS.finditer(text)):
        word_at[match.start() : match.end()] = [number] * (match.end() - match.start())
    numbers = []
    for begin, end in tokens:
        letters = [index for index in range(begin, max(end, begin + 1)) if word_at[min(index, len(text))] is not None]
        numbers.append(word_at[letters[0]] if letters else None)
    return numbers
