"""LibreTranslate's requests and answers, so that its clients can ask this server.

A model serves the pair of languages that its name says or ends with: en-de and opus-mt-en-de translate from en to de;
of two models with the same pair the first one does. Where no model has such a name, the first one answers whatever
languages are asked for. Source: LibreTranslate's API, POST /translate, GET /languages.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fasttfm.decoding.sentences import LANGUAGES
from fasttfm.errors import UserError
from fasttfm.parsing import shown
from fasttfm.serving.options import TEXTS, Option, Schema, checked
from fasttfm.serving.requests import Refused

_PAIR = re.compile(r"(?:.*[-_.])?([a-z]{2})-([a-z]{2})|([a-z]{3})-([a-z]{3})")
"""Codes of ISO 639-1, which are known; of two of three letters alone any."""
_CODE: Schema = {"type": "string"}
OPTIONS = [
    Option("q", "a text or a list of texts", TEXTS, "LibreTranslate's form: what to translate."),
    Option("source", "a text", _CODE, "Code of a language, or auto."),
    Option("target", "a text", _CODE, "Code of a language."),
    Option("format", "text or html", {"enum": ["text", "html"]}, "html: as markup."),
    Option("alternatives", "a whole number, 0 or more", {"type": "integer", "minimum": 0}, "Others of the best."),
    Option("api_key", "a text", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "Not looked at: see Authorization."),
]
"""The fields of its requests."""
_TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
ANSWER: Schema = {
    "type": "object",
    "required": ["translatedText"],
    "additionalProperties": False,
    "properties": {"translatedText": TEXTS, "alternatives": {"anyOf": [_TEXTS, {"type": "array", "items": _TEXTS}]}},
}


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
    try:
        checked(given, OPTIONS, required="q")
    except UserError as error:
        raise Refused(400, str(error)) from None
    alternatives = given.get("alternatives", 0)
    options = {"nbest": 1 + alternatives} if alternatives else {}
    model = _model(given.get("source", "auto"), given.get("target"), models)
    return {"text": given["q"], "model": model, "markup": given.get("format") == "html", **options}


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
