"""Unicode's normal form C (NFC), and invisible characters.

Text from macOS often spells an accented letter as letter plus accent (NFD). To a vocabulary these are other characters
than those of NFC, which nearly all other text uses.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator

_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")
"""Soft hyphen, zero-width space and no-break space (a byte order mark), word joiner, direction marks. Not the joiners
U+200C and U+200D, which Persian, Hindi and emoji need."""


def has_invisible(text: str) -> bool:
    """Whether a text contains invisible characters."""
    return not text.isascii() and _INVISIBLE.search(text) is not None


def has_text(text: str) -> bool:
    """Whether a text contains more than white space and invisible characters."""
    return bool(text.strip()) and (text.isascii() or bool(_INVISIBLE.sub("", text).strip()))


def is_composed(text: str) -> bool:
    """Whether a text is in NFC."""
    return text.isascii() or unicodedata.is_normalized("NFC", text)


def composed(text: str) -> str:
    """The text in NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def composition_rules() -> str:
    """NFC as SentencePiece normalization rules: code points, a tab, code points.

    Several marks on one letter that are not in Unicode's canonical order are not changed.
    """
    rules = dict(_rules())
    return "".join(f"{_codes(parts)}\t{_codes(whole)}\n" for parts, whole in sorted(rules.items()) if parts != whole)


def _rules() -> Iterator[tuple[str, str]]:
    for character in map(chr, range(sys.maxunicode + 1)):
        if "\ud800" <= character <= "\udfff" or unicodedata.is_normalized("NFD", character):
            continue
        whole, parts = unicodedata.normalize("NFC", character), unicodedata.normalize("NFD", character)
        yield parts, whole
        yield character, whole  # for example the Angstrom sign
        yield unicodedata.normalize("NFC", parts[:-1]) + parts[-1], whole  # with the last mark separate


def _codes(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
