"""The only parser of external JSON and YAML, so that all readers reject the same input with one-line messages.

Returns plain values: objects, lists, strings encodable as UTF-8, 64-bit numbers, true, false and null, nested at most
DEEPEST levels. Everything else raises Malformed with its position: invalid syntax or UTF-8, lone surrogates, NaN,
duplicate fields, YAML tags and aliases.
"""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from fasttfm.errors import UserError

DEEPEST = 64
"""Maximum nesting of lists and objects."""
NUMBER_BITS = 64
WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
REQUIRED: Any = object()
"""Marks a field without a default."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 1
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


class Malformed(ValueError):
    """Invalid input. The message continues a sentence that starts with the file name, such as `is truncated`."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        """line: in the file, from 1, if it is known and not part of `problem`."""
        super().__init__(problem)
        self.line = line


def decoded(content: bytes) -> str:
    """Decode UTF-8 and drop a byte order mark. Raises Malformed with the line of an invalid byte."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = error.start - before.rfind(b"\n")
        raise Malformed(
            f"not valid UTF-8 (byte 0x{content[error.start]:02x} at byte {column} of the line)", before.count(b"\n") + 1
        ) from None


def parse_json(content: str | bytes, kind: type | None = None, *, finite: bool = True) -> Any:
    """Parse JSON. kind: required type, dict or list.

    finite: reject NaN and Infinity, which are not JSON but which Python writes. Raises Malformed.
    """
    if isinstance(content, bytes):
        try:
            content = decoded(content)
        except Malformed as error:
            raise Malformed(f"is not JSON: {error} in line {error.line:,}") from None
    try:
        refuse = _refuse_constant if finite else None
        value = json.loads(content, object_pairs_hook=_object, parse_constant=refuse)  # noqa: TID251 (the one place)
    except json.JSONDecodeError as error:
        raise Malformed(_syntax(error)) from None
    except RecursionError:
        raise Malformed(_too_deep()) from None
    except Malformed:
        raise
    except ValueError:  # more digits than Python parses
        raise Malformed(f"has a number of more than {NUMBER_BITS} bits") from None
    _check(value, finite=finite)
    _check_kind(value, kind)
    return value


def shown(value: Any) -> str:
    """A value for a message, abbreviated."""
    return _SHORT.repr(value)


def shortened(text: str, most: int) -> str:
    """A text for a message, with the middle cut out of more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 3]} ... {text[len(text) - most // 2 + 2 :]}"


def type_name(value: Any) -> str:
    """The type of a value in JSON's terms, with its article."""
    return _KINDS.get(type(value), type(value).__name__)


def _check_kind(value: Any, kind: type | None) -> None:
    if kind is not None and not isinstance(value, kind):
        raise Malformed(f"is {type_name(value)}, must be {_KINDS[kind]}")


def characters(text: str) -> str:
    """The text itself. Raises UserError for lone surrogates, which UTF-8 cannot encode."""
    if not text.isascii():
        try:
            _check_text(text, None)
        except Malformed as error:
            raise UserError(f"the text {shown(text)} {error}: remove it") from None
    return text


def field(value: Any, name: str, kind: type, where: str, default: Any = REQUIRED, remedy: str = "copy it again") -> Any:
    """value[name], of type `kind`: dict, list, str, bool, int or float (which accepts integers).

    default: replaces a missing field or null. Raises UserError with a message that starts with `where`.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: is {type_name(value)}, must be an object: {remedy}")
    content = value.get(name)
    if content is None and default is not REQUIRED:
        return default
    if name not in value:
        raise UserError(f"{where}: has no {name}: {remedy}")
    kinds = (int, float) if kind is float else kind
    if not isinstance(content, kinds) or (isinstance(content, bool) and kind is not bool):
        raise UserError(f"{where}: {name} is {type_name(content)}, must be {_KINDS[kind]}: {remedy}")
    return content


def texts(value: Any, name: str, where: str) -> list[str]:
    """value[name], a list of strings; raises the errors of field()."""
    items = field(value, name, list, where)
    if wrong := [item for item in items if not isinstance(item, str)]:
        raise UserError(f"{where}: {name} contains {type_name(wrong[0])}, must contain strings: copy it again")
    return items


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Malformed(f"has a duplicate field {shown(twice)}")
    return result


def _refuse_constant(text: str) -> None:
    raise Malformed(f"has {text}, which is not a JSON number")


def _syntax(error: json.JSONDecodeError) -> str:
    truncated = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    line = f"line {error.lineno:,}, " if "\n" in error.doc.strip() else ""
    return f"is {'truncated' if truncated else 'not JSON'} at {line}column {error.colno:,} ({error.msg})"


def _too_deep() -> str:
    return f"is nested too deeply: more than {DEEPEST} levels of lists and objects"


_Place = tuple[Any, str | int] | None
"""Path of a value: the path of its container, and its name or index there."""


def _check(root: Any, *, finite: bool) -> None:
    """Raise Malformed for deep nesting, lone surrogates and integers of more than 64 bits.

    finite: also for infinite numbers.
    """
    pending: list[tuple[Any, _Place, int]] = [([root], None, 0)]
    while pending:
        container, place, depth = pending.pop()
        if depth > DEEPEST:
            raise Malformed(_too_deep())
        if type(container) is dict:
            for name in container:
                _check_text(name, place)
        for key, value in container.items() if type(container) is dict else enumerate(container):
            kind = type(value)
            if kind is str:
                if not value.isascii():
                    _check_text(value, (place, key))
            elif kind is dict or kind is list:
                pending.append((value, (place, key) if depth else None, depth + 1))
            elif kind is float:
                if finite and value - value != 0:
                    raise Malformed(f"{_at((place, key))}has a number that is too large")
            elif kind is int and not -(1 << 63) <= value < 1 << 63:
                raise Malformed(f"{_at((place, key))}has a number of more than {NUMBER_BITS} bits")


def _check_text(text: str, place: _Place, line: int | None = None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"{_at(place)}has a lone surrogate \\u{ord(text[error.start]):04x}", line) from None


def _at(place: _Place) -> str:
    """A path such as `data[3].text `; empty for the root."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(f"[{name}]" if isinstance(name, int) else f".{name}"[:60])
    path = "".join(reversed(names)).removeprefix(".")
    return f"{path} " if path and path != "[0]" else ""


# YAML

_YAML = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, restricted to plain values.

    PyYAML reads YAML 1.1, where 010 is eight, 1:30 is ninety, `no` is false and 5e-4 a string. Here a plain scalar that
    is neither null, true, false nor a number is a string. Tags are rejected, and so are aliases of lists and objects,
    because a few lines of them can expand to millions.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (not those shared by all safe loaders)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """See PyYAML's Composer."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if not isinstance(self.anchors.get(event.anchor), yaml.ScalarNode | None):
                raise Malformed("aliases of lists and sections are not supported: write the content out", line)
        elif event.tag is not None:
            raise Malformed(f"the tag {event.tag.replace(_YAML, '!!')} is not supported", line)
        self._depth += 1
        if self._depth > DEEPEST:
            raise Malformed(_too_deep().removeprefix("is "), line)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_SCALARS: dict[str, Callable[[str], Any]] = {
    f"{_YAML}null": lambda text: None,
    f"{_YAML}bool": lambda text: text.lower() == "true",
    f"{_YAML}int": int,
    f"{_YAML}float": float,
    f"{_YAML}str": str,
}
"""Tag of a scalar -> conversion of its text."""

for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", WHOLE_NUMBER.pattern, [*"-+0123456789"]),
    ("float", NUMBER.pattern, [*"-+.0123456789"]),
):
    for _class in (_Loader, _Dumper):  # the dumper quotes strings that either schema would read as another type
        _class.add_implicit_resolver(f"{_YAML}{_tag}", re.compile(rf"(?:{_pattern})\Z", re.ASCII), _first)


Lines = dict[tuple[str | int, ...], int]
"""Path of a field (names and list indices) -> its line; () is the root."""


def parse_yaml_lines(content: bytes) -> tuple[Any, Lines]:
    """The value of a YAML text (None if empty), and the lines of its fields. Raises Malformed with the line."""
    text = decoded(content)
    try:
        node = yaml.compose(text, Loader=_Loader)  # noqa: TID251 (the one place)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise Malformed(f"not valid YAML: {problem}", mark.line + 1 if mark else None) from None
    if node is None:
        return None, {(): 1}
    lines: Lines = {}
    return _value(node, (), lines), lines


def _value(node: yaml.Node, path: tuple[str | int, ...], lines: Lines) -> Any:
    """The value of a node; records its line and those of its fields."""
    line = lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_value(each, (*path, number), lines) for number, each in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key, value in node.value:
            name, line = key.value, key.start_mark.line + 1
            place = (*path, name)
            if not isinstance(key, yaml.ScalarNode):
                raise Malformed("a field name must be a scalar", line)
            if name in result:
                raise Malformed(f"duplicate field {name!r} (first in line {lines[place]})", line)
            _check_text(name, None, line)
            lines[place] = line
            result[name] = _value(value, place, lines)
        return result
    try:
        value = _SCALARS[node.tag](node.value)
    except ValueError:  # more digits than Python parses
        raise Malformed(f"{node.value[:40]!r} is not a number", line) from None
    if isinstance(value, str):
        _check_text(value, None, line)
    return value


def parse_yaml(content: bytes, kind: type | None = None) -> Any:
    """The value of a YAML text (None if empty). kind: required type, dict or list. Raises Malformed."""
    try:
        value, _ = parse_yaml_lines(content)
    except Malformed as error:
        place = f" in line {error.line:,}" if error.line else ""
        raise Malformed(f"is not plain YAML{place}: {error}") from None
    _check(value, finite=True)
    _check_kind(value, kind)
    return value


def write_yaml(value: Any, **options: Any) -> str:
    """Write plain values as YAML that parse_yaml() and any YAML 1.1 or 1.2 reader read back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **options)
