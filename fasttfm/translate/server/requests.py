"""Parses and validates the body of POST /translate, by the table of options."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttfm.config import field_types
from fasttfm.config.convert import convert
from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.system.parsing import Malformed, parse_json, shortened
from fasttfm.translate.combinations import refuse_config, refuse_idle
from fasttfm.translate.sentences import sentence_splitter
from fasttfm.translate.server.limits import Limits
from fasttfm.translate.server.options import SEARCH, checked, options
from fasttfm.translate.server.queue import Sentence, sentences_of
from fasttfm.translate.server.texts import Text
from fasttfm.translate.terminology import Terminology
from fasttfm.translate.translator import Translation, Translator

_TOKEN_LENGTH = 32
"""Average characters per token above which a text is refused before tokenization: twice the longest piece of
SentencePiece. The terms of a terminology, and their translations, may average as many."""
_LONGEST_DETAIL = 600
"""Maximum length of an error message."""


class Refused(Exception):
    """A refused request: HTTP status and a one-line message."""

    def __init__(self, status: int, detail: str) -> None:
        """detail: is put on one line and shortened in the middle, since it may quote the request."""
        super().__init__(detail)
        self.status = status
        self.detail = shortened(" ".join(detail.splitlines()), _LONGEST_DETAIL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A valid request."""

    texts: Sequence[Text]
    sentences: list[Sentence]
    """The parts of all texts in order, to be submitted to an engine."""
    alignment: bool
    """Whether to return alignments."""
    stream: bool

    def answers(self, translated: Sequence[list[Translation]]) -> bytes:
        """The JSON response body, from the translations of all parts."""
        following = iter(translated)
        texts = [self.answer(each, [*itertools.islice(following, len(each.lines))]) for each in self.texts]
        return b'{"translations":[%s]}' % b",".join(texts)

    def answer(self, text: Text, translated: Sequence[list[Translation]]) -> bytes:
        """The JSON translations of one text, best first, from those of its parts."""
        best = []
        for rank, each in enumerate(text.put_together(translated)):
            best.append({"text": each.text, "score": each.score})
            if text.has_empty(translated, rank):
                best[-1]["empty"] = True
            if self.alignment:
                best[-1]["alignment"] = each.alignment
        return json.dumps(best, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def read_request(body: bytes, translators: Mapping[str, Translator], limits: Limits) -> Request:
    """Parse a request body. Raises Refused for an invalid request."""
    try:
        fields = parse_json(body)
        if not isinstance(fields, dict):
            raise UserError('the body must be an object such as {"text": "A sentence."}')
        return _read(fields, translators, limits)
    except Malformed as error:
        raise Refused(422, f"the body {error}") from None
    except UserError as error:
        raise Refused(422, str(error)) from None


def _read(fields: Mapping[str, Any], translators: Mapping[str, Translator], limits: Limits) -> Request:
    checked(fields, options([*translators]))
    model = fields.get("model", next(iter(translators)))
    translator = translators[model]
    config = _config(fields, translator.config, limits)
    refuse_config(fields, config)
    refuse_idle(fields, config)
    split = sentence_splitter(fields["split_sentences"], "split_sentences") if "split_sentences" in fields else None
    most = min(limits.tokens, config.max_source_length - len(translator.source_tokenizer.prefix))
    whole = _as_list(fields["text"])
    count = sum(text.count("\n") + 1 for text in whole)
    _refuse_more(count, "text" if count == len(whole) else "line", limits)
    if split is not None:
        _refuse_longer("text", whole, limits.sentences * limits.tokens)
    texts = [Text(text, split) for text in whole]
    lines = [line for text in texts for line in text.lines]
    what = "text" if len(lines) == len(whole) else "line" if split is None else "sentence"
    _refuse_more(len(lines), what, limits)
    prefixes = _prefixes(fields, texts)
    tokens = _token_counts(what, lines, translator.source_tokenizer.encode, most)
    _token_counts("prefix", prefixes, translator.target_tokenizer.encode, most)
    required = _required(fields, translator, lines, limits) if "terminology" in fields else None
    alignment = fields.get("alignment", False)
    if alignment and (translator.source_tokenizer.vocabulary or translator.target_tokenizer.vocabulary):
        raise UserError("alignment is not supported for imported models: omit it")
    return Request(
        texts=texts,
        sentences=sentences_of(model, config, lines, tokens, prefixes, required, alignment),
        alignment=alignment,
        stream=fields.get("stream", False),
    )


def _prefixes(fields: Mapping[str, Any], texts: Sequence[Text]) -> list[str]:
    """Prefixes of all lines."""
    count = sum(len(text.lines) for text in texts)
    prefixes = _as_list(fields.get("prefix", [""] * len(texts)))
    if len(prefixes) != len(texts):
        raise UserError(f"{len(prefixes):,} prefixes were given for {len(texts):,} texts: give one for each")
    if any(prefixes) and count > len(texts):
        raise UserError("a text of several lines has no prefix: give its lines as texts")
    return prefixes if any(prefixes) else [""] * count


def _refuse_more(count: int, what: str, limits: Limits) -> None:
    if count > limits.sentences:
        raise UserError(f"{count:,} {what}s were given: {limits.sentences:,} at most are taken at once")


def _refuse_longer(what: str, texts: Sequence[str], most: int) -> None:
    """Raise UserError for texts so long that a tokenizer or splitter would hold the GIL for long."""
    for number, text in enumerate(texts):
        if len(text) > most:
            raise UserError(f"{what} {number} has {len(text):,} characters: {most:,} at most are taken; split it")


def _token_counts(what: str, lines: Sequence[str], encode: Callable[[str], list[int]], most: int) -> list[int]:
    """Token count of each line. Raises UserError for more than `most`."""
    _refuse_longer(what, lines, _TOKEN_LENGTH * most)
    sizes = []
    for number, line in enumerate(lines):
        sizes.append(len(encode(line)))
        if sizes[-1] > most:
            raise UserError(f"{what} {number} has {sizes[-1]:,} tokens: {most:,} at most are taken; split it")
    return sizes


def _required(
    fields: Mapping[str, Any], translator: Translator, lines: Sequence[str], limits: Limits
) -> list[list[list[list[int]]]]:
    """Required phrases of each line."""
    terms = {term: _as_list(alternatives) for term, alternatives in fields["terminology"].items()}
    translations = [*itertools.chain(*terms.values())]
    if len(translations) > limits.terms:
        count = len(translations)
        raise UserError(f"terminology has {count:,} translations of terms: {limits.terms:,} at most are taken at once")
    most = _TOKEN_LENGTH * limits.terms
    for what, texts in (("terms", terms), ("translations", translations)):
        if (size := sum(map(len, texts))) > most:
            raise UserError(f"the {what} of terminology have {size:,} characters: {most:,} at most are taken at once")
    try:
        terminology = Terminology(terms.items(), translator.target_tokenizer)
    except UserError as error:
        raise UserError(f"terminology: {error}") from None
    required = [terminology.required(line) for line in lines]
    for number, occurrences in enumerate(required):
        size = sum(max(map(len, alternatives)) for alternatives in occurrences)
        if size > limits.tokens:
            raise UserError(
                f"terminology requires {size:,} tokens in line {number}: {limits.tokens:,} at most are taken"
            )
    return required


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _config(fields: Mapping[str, Any], config: DecodingConfig, limits: Limits) -> DecodingConfig:
    types = field_types(DecodingConfig)
    changes = {name: convert(fields[name], types[name], name) for name in SEARCH if name in fields}
    for name in ("beam", "nbest", "max_len_b", "min_len"):
        most = limits.largest_beam if name in ("beam", "nbest") else limits.tokens
        if changes.get(name, 0) > most:
            raise UserError(f"{name} {changes[name]:,} is more than {most:,}, which this server allows")
    if changes.get("max_len_a", 0) > config.max_len_a:
        raise UserError(f"max_len_a {changes['max_len_a']:g} is more than {config.max_len_a:g}")
    if changes.get("nbest", 1) > 1 and "beam" not in changes and not changes.get("sampling"):
        changes["beam"] = max(config.beam, changes["nbest"])
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise UserError(str(error)) from None
