"""Unicode's normal form C, and characters that nobody sees.

Text from macOS often spells an accented letter as the letter and an accent (form D): to a vocabulary these are other
characters than those of form C, in which nearly all other text is.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator

_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")
"""Soft hyphen, zero-width space and no-break space (a byte order mark), word joiner, marks of direction. Not the
joiners U+200C and U+200D, which Persian, Hindi and emoji are spelt with."""


def has_invisible(text: str) -> bool:
    """Return whether a text holds characters that nobody sees."""
    return not text.isascii() and _INVISIBLE.search(text) is not None


def has_text(text: str) -> bool:
    """Return whether a text holds more than white space and characters that nobody sees."""
    return bool(text.strip()) and (text.isascii() or bool(_INVISIBLE.sub("", text).strip()))


def is_composed(text: str) -> bool:
    """Return whether a text is in Unicode's normal form C."""
    return text.isascii() or unicodedata.is_normalized("NFC", text)


def composed(text: str) -> str:
    """The text in Unicode's normal form C."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def composition_rules() -> str:
    """Rules that make normal form C of text, as a file of SentencePiece has them: code points, a tab, code points.

    Marks on one letter that are not in Unicode's order are left as they are.
    """
    rules = dict(_rules())
    return "".join(f"{_codes(parts)}\t{_codes(whole)}\n" for parts, whole in sorted(rules.items()) if parts != whole)


def _rules() -> Iterator[tuple[str, str]]:
    for character in map(chr, range(sys.maxunicode + 1)):
        if "\ud800" <= character <= "\udfff" or unicodedata.is_normalized("NFD", character):
            continue
        whole, parts = unicodedata.normalize("NFC", character), unicodedata.normalize("NFD", character)
        yield parts, whole
        yield character, whole  # such as the Angstrom sign, which is the letter
        yield unicodedata.normalize("NFC", parts[:-1]) + parts[-1], whole  # the last mark is apart


def _codes(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
