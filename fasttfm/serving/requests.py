"""What POST /translate takes: read from JSON, checked, and described in OpenAPI from the same dataclass."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fasttfm.config import field_help, field_types
from fasttfm.config.convert import convert
from fasttfm.config.decoding import DecodingConfig
from fasttfm.decoding.translator import Translator, one_line
from fasttfm.errors import UserError
from fasttfm.parsing import Malformed, parse_json
from fasttfm.serving.limits import Limits

OPTIONS = (
    *("beam", "nbest", "length_penalty", "alpha", "max_len_a", "max_len_b", "min_len", "no_repeat_ngram"),
    *("sampling", "sampling_topk", "sampling_topp", "temperature", "sampling_seed"),
)
"""Fields of DecodingConfig that a request may set."""
_OTHERS = ("text", "prefix", "model", "stream")


class Refused(Exception):
    """A request that is not answered: an HTTP status, and one line that says why."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request that can be answered."""

    model: str
    lines: list[str]
    """The lines of all texts, one after the other."""
    counts: list[int]
    """Lines of each text."""
    tokens: list[int]
    """Source tokens of each line."""
    prefixes: list[str]
    """How the translation of each line must begin."""
    stream: bool
    config: DecodingConfig


def read_body(body: bytes) -> dict[str, Any]:
    """The object in a body; Refused for what is not one."""
    try:
        given = parse_json(body)
    except Malformed as error:
        raise Refused(422, f"the body {error}") from None
    if not isinstance(given, dict):
        raise Refused(422, 'the body must be an object such as {"text": "A sentence."}')
    return given


def read_request(given: Mapping[str, Any], translators: Mapping[str, Translator], limits: Limits) -> Request:
    """The request that a body's object is; Refused for what cannot be answered."""
    if unknown := sorted(set(given) - {*_OTHERS, *OPTIONS}):
        raise Refused(422, f"{unknown[0]!r} is unknown: known are {', '.join((*_OTHERS, *OPTIONS))}")
    stream = given.get("stream", False)
    if not isinstance(stream, bool):
        raise Refused(422, "stream must be true or false")
    texts = _texts(given, "text")
    counts = [text.count("\n") + 1 for text in texts]
    if sum(counts) > limits.sentences:
        what = "texts" if sum(counts) == len(texts) else "lines"
        raise Refused(422, f"{sum(counts):,} {what} were given: {limits.sentences:,} at most are taken at once")
    prefixes = _texts(given, "prefix") if "prefix" in given else [""] * len(texts)
    if len(prefixes) != len(texts):
        raise Refused(422, f"{len(prefixes):,} prefixes were given for {len(texts):,} texts: give one for each")
    if any(map(bool, prefixes)) and sum(counts) > len(texts):
        raise Refused(422, "a text of several lines has no prefix: give its lines as texts")
    model = given.get("model", next(iter(translators)))
    if not isinstance(model, str) or model not in translators:
        raise Refused(422, f"model {model!r} is unknown: known are {', '.join(translators)}")
    translator = translators[model]
    lines = [one_line(line) for text in texts for line in text.split("\n")]
    tokens = [len(translator.source_tokenizer.encode(line)) for line in lines]
    forced = [len(translator.target_tokenizer.encode(prefix)) for prefix in prefixes]
    for kind, sizes in (("text" if len(lines) == len(texts) else "line", tokens), ("prefix", forced)):
        for number, size in enumerate(sizes):
            if size > limits.tokens:
                raise Refused(
                    422, f"{kind} {number} has {size:,} tokens: {limits.tokens:,} at most are taken; split it"
                )
    config = _config(given, translator.config, limits)
    if len(prefixes) < len(lines):
        prefixes = [""] * len(lines)
    return Request(
        model=model, lines=lines, counts=counts, tokens=tokens, prefixes=prefixes, stream=stream, config=config
    )


def _texts(given: Mapping[str, Any], name: str) -> list[str]:
    texts = [given.get(name)] if isinstance(given.get(name), str) else given.get(name)
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise Refused(422, f"{name} must be a text or a list of texts")
    return texts


def _config(given: Mapping[str, Any], config: DecodingConfig, limits: Limits) -> DecodingConfig:
    types = field_types(DecodingConfig)
    try:
        changes = {name: convert(given[name], types[name], name) for name in OPTIONS if name in given}
        for name in ("beam", "nbest", "max_len_b", "min_len"):
            most = limits.largest_beam if name in ("beam", "nbest") else limits.tokens
            if changes.get(name, 0) > most:
                raise Refused(422, f"{name} {changes[name]:,} is more than {most:,}, which this server allows")
        if changes.get("max_len_a", 0) > config.max_len_a:
            raise Refused(422, f"max_len_a {changes['max_len_a']:g} is more than {config.max_len_a:g}")
        if changes.get("nbest", 1) > 1 and "beam" not in changes and not changes.get("sampling"):
            changes["beam"] = max(config.beam, changes["nbest"])
        return dataclasses.replace(config, **changes)
    except (UserError, ValueError) as error:
        raise Refused(422, str(error)) from None


def openapi(translators: Mapping[str, Translator], version: str, *, token: bool) -> dict[str, Any]:
    """The description of the server in OpenAPI 3.1. token: whether it wants a bearer token."""
    texts = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    translation = {
        "type": "object",
        "required": ["text", "score"],
        "properties": {"text": {"type": "string"}, "score": {"type": "number"}},
    }
    several = {"type": "array", "items": {"type": "array", "items": translation}}
    answer = {"type": "object", "required": ["translations"], "properties": {"translations": several}}
    request = {
        "type": "object",
        "required": ["text"],
        "additionalProperties": False,
        "properties": {
            "text": {**texts, "description": "What to translate; lines stay lines, each is translated by itself."},
            "prefix": {**texts, "description": "How the translation of each text must begin."},
            "model": {"enum": list(translators), "description": "Which model, the first one where it is not said."},
            "stream": {"type": "boolean", "description": "Server-sent events, one a text, as each is ready."},
            **{name: _schema(name) for name in OPTIONS},
        },
    }
    refusals = {
        "401": "no bearer token, or a wrong one",
        "413": "the body is too large",
        "422": "what is asked for cannot be done",
        "429": "too many sentences wait",
        "504": "it took too long",
    }
    detail = {"type": "object", "properties": {"detail": {"type": "string"}}}
    responses: dict[str, Any] = {
        status: {"description": text, "content": {"application/json": {"schema": detail}}}
        for status, text in refusals.items()
    }
    responses["200"] = {
        "description": "The nbest translations of each text, best first.",
        "content": {"application/json": {"schema": answer}, "text/event-stream": {"schema": {"type": "string"}}},
    }
    post: dict[str, Any] = {
        "summary": "Translate",
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": responses,
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "fasttfm", "version": version},
        "paths": {
            "/translate": {"post": post},
            "/health": {"get": {"summary": "Whether it runs", "responses": {"200": {"description": "It does."}}}},
            "/metrics": {"get": {"summary": "For Prometheus", "responses": {"200": {"description": "Its text."}}}},
        },
    }
    if token:
        described["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        post["security"] = [{"token": []}]
    return described


def _schema(name: str) -> dict[str, Any]:
    kind = field_types(DecodingConfig)[name]
    if typing.get_origin(kind) is Literal:
        schema: dict[str, Any] = {"enum": list(typing.get_args(kind))}
    else:
        schema = {"type": {int: "integer", float: "number", bool: "boolean"}[kind]}
    return {**schema, "description": field_help(DecodingConfig)[name]}
