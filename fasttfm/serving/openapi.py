"""The server described by its own table of options: in OpenAPI 3.1 for programs, and as a page for people."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from fasttfm.serving import libretranslate
from fasttfm.serving.options import Option, Schema, as_schema, options

_PAGE = Path(__file__).with_name("docs.html")
_TRANSLATION: Schema = {
    "type": "object",
    "required": ["text", "score"],
    "additionalProperties": False,
    "properties": {
        "text": {"type": "string"},
        "score": {"type": "number"},
        "alignment": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        },
    },
}
_ANSWER: Schema = {
    "type": "object",
    "required": ["translations"],
    "additionalProperties": False,
    "properties": {"translations": {"type": "array", "items": {"type": "array", "items": _TRANSLATION}}},
}
_DETAIL: Schema = {"type": "object", "required": ["detail"], "properties": {"detail": {"type": "string"}}}
_ERROR: Schema = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
"""To requests in LibreTranslate's form."""
_REFUSALS = {
    "401": "No bearer token, or a wrong one.",
    "403": "By another name, or from a page that may not ask.",
    "413": "The body is too large.",
    "422": "What is asked for cannot be done.",
    "429": "Too many sentences wait.",
    "503": "The server is being stopped.",
    "504": "It took too long.",
}
_LANGUAGE: Schema = {
    "type": "object",
    "required": ["code", "name", "targets"],
    "properties": {
        "code": {"type": "string"},
        "name": {"type": "string"},
        "targets": {"type": "array", "items": {"type": "string"}},
    },
}
_HEALTH: Schema = {
    "type": "object",
    "required": ["status", "models", "version", "sentences", "body_bytes"],
    "properties": {
        "status": {"const": "ok"},
        "models": {"type": "array", "items": {"type": "string"}},
        "version": {"type": "string"},
        "sentences": {"type": "integer", "description": "Most texts of a request."},
        "body_bytes": {"type": "integer", "description": "Most bytes of a request."},
    },
}


def openapi(models: Sequence[str], version: str, *, token: bool) -> dict[str, Any]:
    """The description in OpenAPI 3.1. token: whether a bearer token is needed."""
    ours, theirs = as_schema(options(models), "text"), as_schema(libretranslate.OPTIONS, "q")
    answer = {"anyOf": [_ANSWER, libretranslate.ANSWER]}
    answers: dict[str, Any] = {
        "200": {
            "description": "The nbest translations of each text, best first.",
            "content": {"application/json": {"schema": answer}, "text/event-stream": {"schema": {"type": "string"}}},
        },
        "400": _json("LibreTranslate's form: what is asked for cannot be done.", _ERROR),
        **{status: _json(text, {"anyOf": [_DETAIL, _ERROR]}) for status, text in _REFUSALS.items()},
    }
    post: dict[str, Any] = {
        "summary": "Translate",
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"anyOf": [ours, theirs]}}}},
        "responses": answers,
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "fasttfm", "version": version},
        "paths": {
            "/translate": {"post": post},
            "/languages": _get("Pairs of languages", "By the models' names.", {"type": "array", "items": _LANGUAGE}),
            "/health": _get("Whether it runs", "It does.", _HEALTH),
            "/metrics": {
                "get": {
                    "summary": "Counts for Prometheus",
                    "responses": {
                        "200": {"description": "Its text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
                    },
                }
            },
        },
    }
    if token:
        described["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        post["security"] = [{"token": []}]
    return described


def page(models: Sequence[str], version: str) -> str:
    """The page at /docs: the options of a request, refusals, and the other paths; without scripts."""
    described = openapi(models, version, token=False)
    example = json.dumps({"text": ["A dog runs.", "Two men sit."], "model": models[0]}, ensure_ascii=False)
    gets = [(path, each["get"]["summary"]) for path, each in described["paths"].items() if "get" in each]
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        version=html.escape(version),
        example=html.escape(example),
        options=_rows(_cells(each) for each in options(models)),
        libretranslate=_rows(_cells(each) for each in libretranslate.OPTIONS),
        answers=_rows((status, text) for status, text in _REFUSALS.items()),
        paths=_rows(gets),
    )


def _cells(option: Option) -> tuple[str, str, str]:
    return option.name, option.kind, option.help


def _rows(rows: Any) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)


def _json(text: str, schema: Schema) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _get(summary: str, text: str, schema: Schema) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": _json(text, schema)}}}
