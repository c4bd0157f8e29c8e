"""XLIFF 1.2 and 2, and TMX: XML documents of units, of which those without a translation get one.

Inline codes come in the translation as tags do (markup.py), each once: those that enclose text (g, pc, mrk, hi) around
what theirs is aligned with, all others as they are. What has a translation, or says translate="no", stays as it is.
Entities of a document's own are not read, nor is anything outside of it.
Source: XLIFF 1.2 (OASIS 2008), XLIFF 2.1 (OASIS 2018), TMX 1.4b (LISA 2005).
"""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fasttfm.errors import UserError, optional

_ENCLOSING = frozenset({"g", "pc", "mrk", "hi"})
"""Inline elements whose content is text; that of others is code."""
_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NEEDED = ("new", "needs-translation", "needs-l10n")
"""States of a target in XLIFF 1.2 that holds no translation yet."""


@dataclass(slots=True)
class _Unit:
    """A text to translate."""

    line: str
    """With tags that stand for its inline codes."""
    codes: list[Any]
    """What the tags c0, c1, ... stand for."""
    space: tuple[str, str]
    """White space before and after it."""
    target: Callable[[], Any]
    """Adds the element that its translation is written to."""


class Exchange:
    """A document that is being translated."""

    def __init__(self, root: Any, units: list[_Unit]) -> None:
        self._root, self._units = root, units

    @classmethod
    def parse(cls, content: bytes, form: str, language: str | None, name: str = "standard input") -> Exchange:
        """The document in a file's content.

        form: xliff or tmx. language: of the translations, such as de; None where an XLIFF document says it. name: of
        the file, for messages. UserError for what is not such a document, and where lxml is not installed.
        """
        etree = optional("lxml.etree", "xliff")
        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
        try:
            root = etree.fromstring(content, parser)
        except etree.XMLSyntaxError as error:
            raise UserError(f"{name}: is not XML: {str(error).splitlines()[0]}") from None
        if _local(root) != form:
            raise UserError(f"{name}: its root is <{_local(root)}>, not <{form}>: give another --format")
        units = _of_tmx(root, language, name) if form == "tmx" else _of_xliff(root, language, name)
        return cls(root, [*units])

    @property
    def lines(self) -> list[str]:
        """Return the lines to translate, with tags."""
        return [unit.line for unit in self._units]

    def fill(self, translations: Iterable[str]) -> None:
        """Puts the translation of each line, with its tags, into the document."""
        from lxml import etree

        for unit, text in zip(self._units, translations, strict=True):
            before, after = unit.space
            written = etree.fromstring(f"<t>{before}{_NOT_XML.sub(' ', text)}{after}</t>")
            _put(written, unit.target(), unit.codes)

    def write(self) -> bytes:
        """The document in UTF-8."""
        from lxml import etree

        return etree.tostring(self._root.getroottree(), encoding="UTF-8", xml_declaration=True) + b"\n"


def _of_xliff(root: Any, language: str | None, name: str) -> Iterator[_Unit]:
    namespace = root.tag[: -len("xliff")]
    second = root.get("version", "").startswith("2")
    given = "trgLang" if second else "target-language"
    for each in [root] if second else root.iter(f"{namespace}file"):
        if language is not None and each.get(given) is None:
            each.set(given, language)
    if second and root.get(given) is None:
        raise UserError(f"{name}: has no trgLang: give --target-language")
    for parent in root.iter(f"{namespace}{'segment' if second else 'trans-unit'}"):
        source, target = parent.find(f"{namespace}source"), parent.find(f"{namespace}target")
        if source is None or _kept(parent) or (target is not None and _translated(target)):
            continue
        yield _unit(source, partial(_target, parent, source, target))


def _target(parent: Any, source: Any, old: Any) -> Any:
    """An empty target, in the place of one without a translation, or after the source."""
    namespace = source.tag[: -len("source")]
    if old is not None:
        for child in [*old]:
            old.remove(child)
        old.attrib.pop("state", None)
        return old
    target = source.makeelement(f"{namespace}target", nsmap=source.nsmap)
    before = parent.find(f"{namespace}seg-source")
    before = source if before is None else before
    target.tail = before.tail
    before.addnext(target)
    before.tail = source.tail
    return target


def _translated(target: Any) -> bool:
    return target.get("state") not in _NEEDED and bool("".join(target.itertext()).strip() or len(target))


def _kept(element: Any) -> bool:
    """Return whether the nearest element that says anything says translate="no"."""
    while element is not None:
        if element.get("translate") is not None:
            return element.get("translate") == "no"
        element = element.getparent()
    return False


def _of_tmx(root: Any, language: str | None, name: str) -> Iterator[_Unit]:
    if language is None:
        raise UserError(f"{name}: a TMX document needs --target-language, such as de")
    header = root.find("header")
    usual = "" if header is None else header.get("srclang", "")
    for unit in root.iter("tu"):
        variants = [each for each in unit.iterchildren("tuv") if each.find("seg") is not None]
        if any(_same(_language(each), language) for each in variants):
            continue
        wanted = unit.get("srclang", usual)
        sources = [each for each in variants if wanted.lower() in ("", "*all*") or _same(_language(each), wanted)]
        if sources:
            yield _unit(sources[0].find("seg"), partial(_variant, sources[0], language))


def _variant(source: Any, language: str) -> Any:
    """The text of a new variant after its source."""
    variant = source.makeelement("tuv", {_LANG: language})
    segment = source.makeelement("seg")
    variant.append(segment)
    variant.tail = source.tail
    source.addnext(variant)
    return segment


def _language(variant: Any) -> str:
    return variant.get(_LANG) or variant.get("lang") or ""


def _same(one: str, other: str) -> bool:
    """Return whether two codes are one language; de-AT is a kind of de."""
    one, other = one.lower().replace("_", "-"), other.lower().replace("_", "-")
    return one == other or one.startswith(f"{other}-") or other.startswith(f"{one}-")


def _unit(source: Any, target: Callable[[], Any]) -> _Unit:
    codes: list[Any] = []
    line = "".join(_tagged(source, codes))
    text = line.strip()
    begin = line.find(text)
    return _Unit(" ".join(text.splitlines()), codes, (line[:begin], line[begin + len(text) :]), target)


def _tagged(element: Any, codes: list[Any]) -> Iterator[str]:
    """The content of an element, with a tag for each code in it."""
    yield html.escape(element.text or "", quote=False)
    for child in element:
        name = f"c{len(codes)}"
        codes.append(child)
        if _encloses(child):
            yield f"<{name}>"
            yield from _tagged(child, codes)
            yield f"</{name}>"
        else:
            yield f"<{name}/>"
        yield html.escape(child.tail or "", quote=False)


def _encloses(element: Any) -> bool:
    return _local(element) in _ENCLOSING and element.get("translate") != "no" and element.get("mtype") != "protected"


def _put(written: Any, target: Any, codes: Sequence[Any]) -> None:
    """The content of what was written, with the codes that its tags stand for."""
    target.text = written.text
    for child in written:
        code = codes[int(child.tag[1:])]
        if _encloses(code):
            added = code.makeelement(code.tag, code.attrib, nsmap=code.nsmap)
            _put(child, added, codes)
        else:
            added = copy.deepcopy(code)
        added.tail = child.tail
        target.append(added)


def _local(element: Any) -> str:
    """The name of an element without its namespace; empty for comments, entities and instructions."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
