"""The server described by its own table of options: in OpenAPI 3.1 for programs, and as a page for people."""

import copy
import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from fasttfm.parsing import parse_yaml
from fasttfm.serving import libretranslate
from fasttfm.serving.options import Option, Schema, as_schema, options

_PAGE = Path(__file__).with_name("docs.html")
_PARTS = parse_yaml(Path(__file__).with_suffix(".yaml").read_bytes())


def openapi(models: Sequence[str], version: str, *, token: bool) -> dict[str, Any]:
    """The description in OpenAPI 3.1. token: whether a bearer token is needed."""
    ours, theirs = as_schema(options(models), "text"), as_schema(libretranslate.OPTIONS, "q")
    json_or_events = {
        "application/json": {"schema": {"anyOf": [_PARTS["answer"], libretranslate.ANSWER]}},
        "text/event-stream": {"schema": {"type": "string"}},
    }
    described = copy.deepcopy(_PARTS["document"])
    described["info"]["version"] = version
    post = described["paths"]["/translate"]["post"]
    post["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"anyOf": [ours, theirs]}}}}
    post["responses"] = {
        "200": {"description": "The nbest translations of each text, best first.", "content": json_or_events},
        "400": _refusal("LibreTranslate's form: what is asked for cannot be done.", _PARTS["error"]),
    }
    for status, text in _PARTS["refusals"].items():
        post["responses"][status] = _refusal(text, {"anyOf": [_PARTS["detail"], _PARTS["error"]]})
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
        answers=_rows((status, text) for status, text in _PARTS["refusals"].items()),
        paths=_rows(gets),
    )


def _cells(option: Option) -> tuple[str, str, str]:
    return option.name, option.kind, option.help


def _rows(rows: Any) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)


def _refusal(text: str, schema: Schema) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
