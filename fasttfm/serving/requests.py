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

OPTIONS = ("beam", "nbest", "length_penalty", "alpha", "max_len_a", "max_len_b", "min_len", "no_repeat_ngram")
"""Fields of DecodingConfig that a request may set."""
_OTHERS = ("text", "model", "stream")


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
    texts: list[str]
    tokens: list[int]
    """Source tokens of each."""
    stream: bool
    config: DecodingConfig


def read_request(body: bytes, translators: Mapping[str, Translator], limits: Limits) -> Request:
    """The request in a body; Refused for what cannot be answered."""
    try:
        given = parse_json(body)
    except Malformed as error:
        raise Refused(422, f"the body {error}") from None
    if not isinstance(given, dict):
        raise Refused(422, 'the body must be an object such as {"text": "A sentence."}')
    if unknown := sorted(set(given) - {*_OTHERS, *OPTIONS}):
        raise Refused(422, f"{unknown[0]!r} is unknown: known are {', '.join((*_OTHERS, *OPTIONS))}")
    text, stream = given.get("text"), given.get("stream", False)
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise Refused(422, "text must be a text or a list of texts")
    if not isinstance(stream, bool):
        raise Refused(422, "stream must be true or false")
    if len(texts) > limits.sentences:
        raise Refused(422, f"{len(texts):,} texts were given: {limits.sentences:,} at most are taken at once")
    model = given.get("model", next(iter(translators)))
    if not isinstance(model, str) or model not in translators:
        raise Refused(422, f"model {model!r} is unknown: known are {', '.join(translators)}")
    translator = translators[model]
    lines = [one_line(each) for each in texts]
    tokens = [len(translator.source_tokenizer.encode(line)) for line in lines]
    for number, size in enumerate(tokens):
        if size > limits.tokens:
            raise Refused(422, f"text {number} has {size:,} tokens: {limits.tokens:,} at most are taken; split it")
    config = _config(given, translator.config, limits)
    return Request(model=model, texts=lines, tokens=tokens, stream=stream, config=config)


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
        if changes.get("nbest", 1) > 1 and "beam" not in changes:
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
            "text": {**texts, "description": "What to translate; a line each."},
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
