"""External JSON and YAML: plain data are parsed, everything else is refused in one line with its position."""

import math
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fasttfm.errors import UserError
from fasttfm.system.files import read_json, read_plain_yaml
from fasttfm.system.parsing import DEEPEST, Malformed, field, parse_json, parse_yaml, texts, write_yaml


def assert_refused(parse, content, problem):
    with pytest.raises(Malformed) as error:
        parse(content)
    told = str(error.value)
    assert told.startswith(problem)
    assert "\n" not in told
    assert len(told) < 300


_NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, allow_infinity=False)


def plain(names, others, most):
    """A strategy for plain data of at most `most` values. names: of fields. others: scalars besides numbers."""
    values = st.none() | st.booleans() | _NUMBERS | others
    return st.recursive(values, lambda each: st.lists(each) | st.dictionaries(names, each), max_leaves=most)


_PRINTED = st.text(string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", ""))
_ODD = ["1e5", "010", "1:30", "no", "on", "~", "0x1F", "1_0", "2020-01-01", ".inf", "=", "<<", "- a", "a: b"]


@given(plain(_PRINTED, _PRINTED | st.sampled_from(_ODD), 10))
def test_yaml_round_trips_here_and_in_pyyaml(value):
    text = write_yaml(value)
    assert parse_yaml(text.encode()) == value
    assert yaml.safe_load(text) == value


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is truncated at column 1"),
        (b'{"a": 1', "is truncated at column 8"),
        (b'{"a":\n 1,, }', "is not JSON at line 2, column 4"),
        (b"M\xe4nner", "is not JSON: not valid UTF-8 (byte 0xe4 at byte 2 of the line) in line 1"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "is nested too deeply"),
        (rb'{"a": {"b": [0, "x\ud800y"]}}', r"a.b[1] has a lone surrogate \ud800"),
        (rb'{"a": {"\udc00": 1}}', r"a has a lone surrogate \udc00"),
        (b"[1, NaN]", "has NaN, which is not a JSON number"),
        (b'{"lr": [1e400]}', "lr[0] has a number that is too large"),
        (b'{"layers": 9223372036854775808}', "layers has a number of more than 64 bits"),
        (b'{"a": 1, "b": 2, "a": 1}', "has a duplicate field 'a'"),
    ],
)  # fmt: skip
def test_invalid_json_is_refused_in_one_line(content, problem):
    assert_refused(parse_json, content, problem)


def test_json_may_be_nested_up_to_the_limit_and_start_with_a_byte_order_mark():
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
    assert parse_json('\ufeff{"a": "\\ud83d\\ude00"}'.encode()) == {"a": "😀"}
    assert math.isnan(parse_json("[NaN]", finite=False)[0])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: !!bool maybe", "is not plain YAML in line 1: the tag !!bool is not supported"),
        ("!!python/object/apply:os.system [true]", "is not plain YAML in line 1: the tag !!python"),
        ("9" * 5000, "is not plain YAML in line 1: '999"),
        ("a: 1\na: 2", "is not plain YAML in line 2: duplicate field 'a' (first in line 1)"),
        ("? [a]\n: 1", "is not plain YAML in line 1: a field name must be"),
        ("a: &a [*a]", "is not plain YAML in line 1: aliases of lists and sections are not supported"),
        ("a: [", "is not plain YAML in line 1: not valid YAML"),
        ("a: " + "[" * 100_000, "is not plain YAML in line 1: nested too deeply"),
        (r'a: "\ud800"', r"is not plain YAML in line 1: has a lone surrogate \ud800"),
        ("a: 1\n---\nb: 1", "is not plain YAML in line 2: not valid YAML"),
        ("a: 1\nlayers: 9223372036854775808", "layers has a number of more than 64 bits"),
        ("a: {b: [1e400]}", "a.b[0] has a number that is too large"),
    ],
)
def test_invalid_yaml_is_refused_in_one_line(content, problem):
    assert_refused(parse_yaml, content.encode(), problem)


@pytest.mark.parametrize(
    ("read", "content", "problem"),
    [
        (read_json, b"[1]", "is a list, must be an object"),
        (read_plain_yaml, b"3", "is an integer, must be an object"),
        (read_plain_yaml, b"\xff", "is not plain YAML in line 1: not valid UTF-8"),
    ],
)
def test_an_invalid_file_is_named(tmp_path, read, content, problem):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {problem}")


def test_a_field_has_the_requested_type():
    given = {"n": 3, "x": 0.5, "t": "a", "yes": True, "none": None, "l": ["a", 1]}
    assert field(given, "n", int, "f") == 3
    assert field(given, "n", float, "f") == 3
    assert field(given, "none", int, "f", 7) == 7
    assert field(given, "absent", list, "f", []) == []
    for name, kind, problem in (
        ("x", int, "f: x is a number, must be an integer"),
        ("yes", int, "f: yes is true or false, must be an integer"),
        ("n", bool, "f: n is an integer, must be true or false"),
        ("none", int, "f: none is null, must be an integer"),
        ("absent", int, "f: has no absent"),
    ):
        with pytest.raises(UserError) as error:
            field(given, name, kind, "f")
        assert str(error.value).startswith(problem)
    with pytest.raises(UserError, match="f: l contains an integer, must contain strings"):
        texts(given, "l", "f")
    with pytest.raises(UserError, match="f: is a list, must be an object"):
        field([], "n", int, "f")
