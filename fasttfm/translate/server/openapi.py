"""API description generated from the table of options: OpenAPI 3.1, and a page for people."""

import copy
import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from fasttfm.system.parsing import parse_yaml
from fasttfm.translate.server.options import Schema, as_schema, options

_PAGE = Path(__file__).with_name("docs.html")
_PARTS = parse_yaml(Path(__file__).with_suffix(".yaml").read_bytes())


def openapi(models: Sequence[str], version: str, *, token: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. token: whether a bearer token is required."""
    json_or_events = {
        "application/json": {"schema": _PARTS["answer"]},
        "text/event-stream": {"schema": {"type": "string"}},
    }
    described = copy.deepcopy(_PARTS["document"])
    described["info"]["version"] = version
    post = described["paths"]["/translate"]["post"]
    post["requestBody"] = {"required": True, "content": _json(as_schema(options(models)))}
    best = {"description": "The nbest translations of each text, best first.", "content": json_or_events}
    refusals = {
        status: {"description": text, "content": _json(_PARTS["detail"])} for status, text in _PARTS["refusals"].items()
    }
    post["responses"] = {"200": best, **refusals}
    if token:
        described["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        post["security"] = [{"token": []}]
    return described


def page(models: Sequence[str], version: str) -> str:
    """The page at /docs: options of a request, error statuses, and other paths; without scripts."""
    described = openapi(models, version, token=False)
    example = json.dumps({"text": ["A dog runs.", "Two men sit."], "model": models[0]}, ensure_ascii=False)
    gets = [(path, each["get"]["summary"]) for path, each in described["paths"].items() if "get" in each]
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        version=html.escape(version),
        example=html.escape(example),
        options=_rows((each.name, each.kind, each.help) for each in options(models)),
        answers=_rows((status, text) for status, text in _PARTS["refusals"].items()),
        paths=_rows(gets),
    )


def _rows(rows: Any) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
