"""Fields of POST /translate in one table, which parses requests and generates /openapi.json, /docs and the list in
docs/serve.md."""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fasttfm.config import field_help, field_types
from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.system.parsing import shown

Schema = dict[str, Any]
"""JSON Schema; supported: type, enum, anyOf, items, minItems, additionalProperties."""

SEARCH = (
    *("beam", "nbest", "length_penalty", "alpha", "early_stopping", "max_len_a", "max_len_b", "min_len"),
    "no_repeat_ngram",
    *("sampling", "sampling_topk", "sampling_topp", "temperature", "sampling_seed"),
)
"""Fields of DecodingConfig that a request may set."""


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a request."""

    name: str
    kind: str
    """Description of a valid value: `a number`."""
    schema: Schema
    help: str


_TEXTS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_ALTERNATIVES: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_KINDS: dict[Any, tuple[str, str]] = {
    int: ("integer", "a whole number"),
    float: ("number", "a number"),
    bool: ("boolean", "true or false"),
    str: ("string", "a text"),
}
"""Python type -> JSON Schema type, and its description."""


def options(models: Sequence[str] = ()) -> list[Option]:
    """All fields of a request to a server with these models."""
    names = f"one of {', '.join(models)}" if models else "a model's name"
    return [
        Option("text", "a text or a list of texts", _TEXTS, "Text to translate; each line is translated by itself."),
        Option("prefix", "a text or a list of texts", _TEXTS, "Start of the translation of each text."),
        Option("model", names, {"enum": list(models)}, "Directory name of the model (default: the first model)."),
        _plain("stream", bool, "Send server-sent events: one for each text, in order, then the event done."),
        Option(
            "terminology",
            "an object such as {\"dog\": [\"Hund\", \"Hündin\"]}",
            {"type": "object", "additionalProperties": _ALTERNATIVES},
            "Terms of the source with their translations; a text with a term gets one of its translations.",
        ),
        _plain("alignment", bool, "Return pairs (word of the text, word of the translation), counted from 0."),
        _plain("split_sentences", str, "Language of the text (en, ...); split it into sentences and translate each."),
        *(_of_search(name) for name in SEARCH),
    ]  # fmt: skip


def checked(fields: Mapping[str, Any], table: Sequence[Option]) -> None:
    """Raise UserError for unknown fields, values of the wrong kind, and missing text."""
    by_name = {each.name: each for each in table}
    if unknown := sorted(set(fields) - set(by_name)):
        raise UserError(f"{shown(unknown[0])} is unknown: known are {', '.join(by_name)}")
    if "text" not in fields:
        raise UserError(f"text must be given: {by_name['text'].kind}")
    for name, value in fields.items():
        if not matches(by_name[name].schema, value):
            raise UserError(f"{name} must be {by_name[name].kind}: {shown(value)} was given")


def matches(schema: Schema, value: Any) -> bool:
    """Return whether a JSON value matches the schema."""
    if "anyOf" in schema:
        return any(matches(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return isinstance(value, str) and value in schema["enum"]
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    if schema["type"] == "integer":
        return _is_number(value) and value == int(value)
    if schema["type"] == "number":
        return _is_number(value)
    if schema["type"] == "string":
        return isinstance(value, str)
    if schema["type"] == "array":
        least = schema.get("minItems", 0)
        return isinstance(value, list) and len(value) >= least and all(matches(schema["items"], each) for each in value)
    return isinstance(value, dict) and all(matches(schema["additionalProperties"], each) for each in value.values())


def as_schema(table: Sequence[Option]) -> Schema:
    """JSON Schema of a request with these fields."""
    return {
        "type": "object",
        "required": ["text"],
        "additionalProperties": False,
        "properties": {each.name: {**each.schema, "description": each.help} for each in table},
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(name: str, kind: type, text: str) -> Option:
    of_json, in_words = _KINDS[kind]
    return Option(name, in_words, {"type": of_json}, text)


def _of_search(name: str) -> Option:
    kind, text = field_types(DecodingConfig)[name], field_help(DecodingConfig)[name]
    if typing.get_origin(kind) is Literal:
        choices = list(typing.get_args(kind))
        return Option(name, f"one of {', '.join(choices)}", {"enum": choices}, text)
    return _plain(name, kind, text)
