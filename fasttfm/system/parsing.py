"""JSON and YAML from outside: read here and nowhere else, so that every reader refuses the same things in a line.

What comes back is plain: objects, lists, texts that UTF-8 can write, numbers that 64 bits hold, true, false and null,
nested at most DEEPEST deep. Everything else raises Malformed, which says what is wrong and where: broken syntax, bytes
that are not UTF-8, half of a surrogate pair, NaN, a field that is given twice, a tag or an alias of YAML.
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
"""Most lists and objects inside one another."""
NUMBER_BITS = 64
WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
REQUIRED: Any = object()
"""As a default: there is none."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 1
_KINDS: dict[type, tuple[str, str]] = {
    dict: ("an object", "an object"),
    list: ("a list", "a list"),
    str: ("a text", "a text"),
    bool: ("true or false", "true or false"),
    int: ("a whole number", "a whole number"),
    float: ("a number", "a number"),
    type(None): ("null", "null"),
}


class Malformed(ValueError):
    """Input that cannot be used. The message goes on a sentence that begins with the file's name: `is cut off`."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        """line: of the file, from 1, where it is known and problem does not say it."""
        super().__init__(problem)
        self.line = line


def decoded(content: bytes) -> str:
    """UTF-8 as text, without a byte order mark. Malformed names the line of what is not UTF-8."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = error.start - before.rfind(b"\n")
        raise Malformed(
            f"not valid UTF-8 (byte 0x{content[error.start]:02x} at byte {column} of the line)", before.count(b"\n") + 1
        ) from None


def parse_json(content: str | bytes, kind: type | None = None, *, finite: bool = True) -> Any:
    """The value that a JSON text holds; kind: dict or list where it must be one.

    finite: whether NaN and Infinity, which JSON has not, are refused; Python writes them. Raises Malformed.
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
    except ValueError:  # more digits than Python reads
        raise Malformed(f"has a number of more than {NUMBER_BITS} bits") from None
    _check(value, finite=finite)
    if kind is not None and not isinstance(value, kind):
        raise Malformed(f"is {told(value)}, it must be {_KINDS[kind][1]}")
    return value


def shown(value: Any) -> str:
    """A value for a message; of a long one a part."""
    return _SHORT.repr(value)


def shortened(text: str, most: int) -> str:
    """A text for a message; of a long one the beginning and the end, so many characters in all."""
    return text if len(text) <= most else f"{text[: most // 2 - 3]} ... {text[len(text) - most // 2 + 2 :]}"


def told(value: Any) -> str:
    """The type of a value as JSON calls it."""
    return _KINDS.get(type(value), (type(value).__name__,))[0]


def characters(text: str) -> str:
    """The text itself. Raises UserError for half of a surrogate pair, which UTF-8 cannot write."""
    if not text.isascii():
        try:
            _check_text(text, None)
        except Malformed as error:
            raise UserError(f"the text {shown(text)} {error}: leave it out") from None
    return text


def field(given: Any, name: str, kind: type, where: str, default: Any = REQUIRED, remedy: str = "copy it again") -> Any:
    """given[name], which must be of a kind: dict, list, str, bool, int or float, which a whole number is too.

    default: what stands for a field that is not given, or null. Raises UserError, which begins with where.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: is {told(given)}, it must be an object: {remedy}")
    value = given.get(name)
    if value is None and default is not REQUIRED:
        return default
    if name not in given:
        raise UserError(f"{where}: has no {name}: {remedy}")
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where}: {name} is {told(value)}, it must be {_KINDS[kind][1]}: {remedy}")
    return value


def texts(given: Any, name: str, where: str, remedy: str = "copy it again") -> list[str]:
    """The texts of a list in a parsed document; errors as field() raises them."""
    values = field(given, name, list, where, remedy=remedy)
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise UserError(f"{where}: {name} holds {told(wrong[0])}, it must hold texts: {remedy}")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Malformed(f"has the field {shown(twice)} twice in one object")
    return result


def _refuse_constant(text: str) -> None:
    raise Malformed(f"has {text}, which is not a number of JSON")


def _syntax(error: json.JSONDecodeError) -> str:
    cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    line = f"line {error.lineno:,}, " if "\n" in error.doc.strip() else ""
    return f"is {'cut off' if cut else 'not JSON'} at {line}column {error.colno:,} ({error.msg})"


def _too_deep() -> str:
    return f"is nested too deeply: more than {DEEPEST} lists and objects are inside one another"


_Place = tuple[Any, str | int] | None
"""The place around a value, and its name or number there."""


def _check(root: Any, *, finite: bool) -> None:
    """Raise Malformed for what is nested too deeply, half surrogates, and whole numbers that 64 bits do not hold.

    finite: also for infinite numbers.
    """
    waiting: list[tuple[Any, _Place, int]] = [([root], None, 0)]
    while waiting:
        container, place, depth = waiting.pop()
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
                waiting.append((value, (place, key) if depth else None, depth + 1))
            elif kind is float:
                if finite and value - value != 0:
                    raise Malformed(f"{_at((place, key))}has a number that is too large")
            elif kind is int and not -(1 << 63) <= value < 1 << 63:
                raise Malformed(f"{_at((place, key))}has a number of more than {NUMBER_BITS} bits")


def _check_text(text: str, place: _Place, line: int | None = None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise Malformed(f"{_at(place)}holds {half}, half of a surrogate pair, which is not a character", line) from None


def _at(place: _Place) -> str:
    """`data[3].text: `, or nothing for the whole."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(f"[{name}]" if isinstance(name, int) else f".{name}"[:60])
    path = "".join(reversed(names)).removeprefix(".")
    return f"{path} " if path and path != "[0]" else ""


# YAML

_YAML = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, plain values alone.

    PyYAML reads YAML 1.1: 010 is eight, 1:30 is ninety, `no` is false and 5e-4 a text. Here they are what they say: a
    plain scalar that is neither null, true, false nor a number is a text. Tags are refused, and so are aliases of lists
    and objects, of which a few lines can stand for millions.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (not those that all safe loaders share)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """See PyYAML's Composer."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if not isinstance(self.anchors.get(event.anchor), yaml.ScalarNode | None):
                raise Malformed("an alias must stand for a single value: write the list or section out", line)
        elif event.tag is not None:
            raise Malformed(f"the tag {event.tag.replace(_YAML, '!!')} is not taken", line)
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
"""Tag of a scalar -> its value."""

for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", WHOLE_NUMBER.pattern, [*"-+0123456789"]),
    ("float", NUMBER.pattern, [*"-+.0123456789"]),
):
    for _class in (_Loader, _Dumper):  # what is written is quoted where either schema would read another type
        _class.add_implicit_resolver(f"{_YAML}{_tag}", re.compile(rf"(?:{_pattern})\Z", re.ASCII), _first)


Lines = dict[tuple[str | int, ...], int]
"""Path of a field, names and numbers in lists -> its line; () is the whole."""


def parse_yaml_lines(content: bytes) -> tuple[Any, Lines]:
    """The value of a YAML text, null for an empty one, and the lines of its fields. Raises Malformed with the line."""
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
    """The value of a node; it, and the fields in it, get their lines."""
    line = lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_value(each, (*path, number), lines) for number, each in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key, value in node.value:
            name, line = key.value, key.start_mark.line + 1
            place = (*path, name)
            if not isinstance(key, yaml.ScalarNode):
                raise Malformed("the name of a field must be a single word", line)
            if name in result:
                raise Malformed(f"the field {name!r} is given twice (first in line {lines[place]})", line)
            _check_text(name, None, line)
            lines[place] = line
            result[name] = _value(value, place, lines)
        return result
    try:
        value = _SCALARS[node.tag](node.value)
    except ValueError:  # more digits than Python reads
        raise Malformed(f"{node.value[:40]!r} is not a number", line) from None
    if isinstance(value, str):
        _check_text(value, None, line)
    return value


def parse_yaml(content: bytes, kind: type | None = None) -> Any:
    """The value of a YAML text, null for an empty one; kind: dict or list where it must be one. Raises Malformed."""
    try:
        value, _ = parse_yaml_lines(content)
    except Malformed as error:
        place = f" in line {error.line:,}" if error.line else ""
        raise Malformed(f"is not plain YAML{place}: {error}") from None
    if kind is not None and not isinstance(value, kind):
        raise Malformed(f"is {told(value)}, it must be {_KINDS[kind][1]}")
    return value


def write_yaml(value: Any, **options: Any) -> str:
    """Plain values as YAML that parse_yaml(), and any reader of YAML 1.1 or 1.2, reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **options)
