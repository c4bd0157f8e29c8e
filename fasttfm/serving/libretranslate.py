"""LibreTranslate's requests and answers, so that its clients can ask this server.

A model serves the pair of languages that its name says or ends with: en-de and opus-mt-en-de translate from en to de;
of two models with the same pair the first one does. Where no model has such a name, the first one answers whatever
languages are asked for. Source: LibreTranslate's API, POST /translate, GET /languages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fasttfm.decoding.sentences import LANGUAGES
from fasttfm.parsing import shown
from fasttfm.serving.requests import Refused

_PAIR = re.compile(r"(?:.*[-_.])?([a-z]{2})-([a-z]{2})|([a-z]{3})-([a-z]{3})")
"""Codes of ISO 639-1, which are known; of two of three letters alone any."""
_FIELDS = ("q", "source", "target", "format", "alternatives", "api_key")


def is_libretranslate(given: Mapping[str, Any]) -> bool:
    """Return whether a request has LibreTranslate's form."""
    return "q" in given


def languages(models: Collection[str]) -> list[dict[str, Any]]:
    """Return the answer to GET /languages: each source language with its targets, by the models' names."""
    targets: dict[str, list[str]] = {}
    for source, target in _pairs(models).values():
        targets.setdefault(source, [])
        targets[source] += [target] if target not in targets[source] else []
    return [{"code": code, "name": code, "targets": found} for code, found in targets.items()]


def read(given: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """The same request in this server's form; Refused for what cannot be answered."""
    if unknown := sorted(set(given) - set(_FIELDS)):
        raise Refused(400, f"{shown(unknown[0])} is unknown: known are {', '.join(_FIELDS)}")
    form = given.get("format", "text")
    if form not in ("text", "html"):
        raise Refused(400, f"format {shown(form)} is not taken: give text or html")
    alternatives = given.get("alternatives", 0)
    if type(alternatives) is not int or alternatives < 0:
        raise Refused(400, "alternatives must be a number, 0 or more")
    options = {"nbest": 1 + alternatives} if alternatives else {}
    model = _model(given.get("source", "auto"), given.get("target"), models)
    return {"text": given["q"], "model": model, "markup": form == "html", **options}


def answer(given: Mapping[str, Any], translations: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """LibreTranslate's answer to a request with these translations of each text, best first."""
    texts = [[each["text"] for each in best] for best in translations]
    whole = isinstance(given["q"], list)
    result: dict[str, Any] = {"translatedText": [best[0] for best in texts] if whole else texts[0][0]}
    if given.get("alternatives"):
        others = [best[1:] for best in texts]
        result["alternatives"] = others if whole else others[0]
    return result


def _pairs(models: Collection[str]) -> dict[str, tuple[str, str]]:
    """The languages of each model whose name says them."""
    pairs = {}
    for name in models:
        if found := _PAIR.fullmatch(name):
            source, target = found[1] or found[3], found[2] or found[4]
            if len(source) == 3 or {source, target} <= LANGUAGES:
                pairs[name] = source, target
    return pairs


def _model(source: Any, target: Any, models: Sequence[str]) -> str:
    pairs = _pairs(models)
    if not pairs:
        return models[0]
    for name, pair in pairs.items():
        if source in (pair[0], "auto") and target == pair[1]:
            return name
    known = ", ".join(dict.fromkeys("-".join(pair) for pair in pairs.values()))
    raise Refused(400, f"from {shown(source)} to {shown(target)} is not served: known are {known}")
