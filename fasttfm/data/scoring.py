"""Scores of translations against raw references, each with the signature that says how it was computed.

Source: Papineni et al. 2002 (BLEU), Popovic 2015 (chrF), Snover et al. 2006 (TER), Post 2018 (sacreBLEU and its
signatures); Koehn 2004 (paired bootstrap) and Riezler and Maxwell 2005 (approximate randomisation).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest, Result

from fasttfm.errors import UserError, optional
from fasttfm.system.machine import version

TOKENIZERS = ("13a", "intl", "char", "zh", "none", "ja-mecab", "ko-mecab", "flores101", "flores200")
"""Tokenizers of sacreBLEU. The mecab ones need extra packages, the flores ones a download."""
AUTO = "auto"
"""In place of a tokenizer: the one that tokenizer_of() the references gives."""
_BY_SCRIPT = {"japanese": ("ja-mecab", "char"), "chinese": ("zh",), "korean": ("ko-mecab", "char"), "thai": ("char",)}
"""Script -> tokenizers for text whose words 13a does not find, the best first."""
_SAMPLE = 1_000
References = Sequence[str] | Sequence[Sequence[str]]
"""Lines, or several such lists: the references of as many people."""


def script_without_words(lines: Sequence[str]) -> str | None:
    """The script that most letters of text are of, if it is one whose words 13a does not find; None for all others."""
    sample = lines[:: max(1, len(lines) // _SAMPLE)]
    letters = Counter(script for line in sample for character in line if (script := _script(character)))
    script = max(letters, key=letters.__getitem__, default="")
    if script in ("japanese", "chinese"):  # kana tell Japanese from Chinese
        script = "japanese" if 20 * letters["japanese"] > letters["chinese"] else "chinese"
    return script if script in _BY_SCRIPT else None


def tokenizer_of(lines: Sequence[str], *, packages: bool = True) -> str:
    """The name of the tokenizer for text by its script; packages: one that needs a package, where that is installed."""
    for name in _BY_SCRIPT.get(script_without_words(lines) or "", ()):
        if not name.endswith("mecab") or (packages and find_spec("MeCab" if name == "ja-mecab" else "mecab_ko")):
            return name
    return "13a"


@cache
def _script(character: str) -> str:
    name = unicodedata.name(character, "") if character.isalpha() else ""
    return next((script for begin, script in _SCRIPTS.items() if name.startswith(begin)), "other" if name else "")


_SCRIPTS = {
    "HIRAGANA": "japanese", "KATAKANA": "japanese", "CJK": "chinese", "HANGUL": "korean",
    **dict.fromkeys(("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"), "thai"),
}  # fmt: skip
"""Beginning of Unicode's name of a letter -> its script, thai for all that are written without spaces as Thai is."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score: one number and its name."""

    value: float
    """0 to 100."""
    signature: str
    """sacreBLEU's signature: metric, case, tokenizer, smoothing, version."""


def bleu(hypotheses: Sequence[str], references: References, *, tokenize: str = "13a", lowercase: bool = False) -> Score:
    """Corpus BLEU of raw, detokenised lines. tokenize: one of TOKENIZERS.

    Raises UserError when the tokenizer's package or data is not there; ValueError when the line counts differ.
    """
    if tokenize not in TOKENIZERS:
        raise UserError(f"the tokenizer {tokenize!r} is unknown: one of {', '.join(TOKENIZERS)} is allowed")
    try:
        return _score("BLEU", BLEU(tokenize=tokenize, lowercase=lowercase, force=True), hypotheses, references)
    except RuntimeError as error:
        install = re.search(r"pip install \S+", str(error))
        remedy = f"install it with {install.group()}" if install else " ".join(str(error).split())
        raise UserError(f"the tokenizer {tokenize} is not installed: {remedy}, or use char or 13a") from None
    except OSError as error:  # flores models are downloaded at first use
        raise UserError(
            f"the tokenizer {tokenize} must be downloaded once and could not be ({error}): use char, intl or 13a"
        ) from None


def refuse_missing(tokenize: str, *, compound_split: bool, with_comet: bool) -> None:
    """Raise UserError for a package or data that these scores need and that are not there, before lines are read.

    tokenize, compound_split, with_comet: what bleu(), compound_split_bleu() and comet() will be called for.
    """
    bleu([""], [""], tokenize=tokenize)
    if compound_split:
        compound_tokens([])
    if with_comet:
        _comet_package()


def compound_split_bleu(hypotheses: Sequence[str], references: References) -> Score:
    """The tokenised number with split compounds that papers on WMT14 English-German print.

    Words joined by a hyphen count as three, as in tensor2tensor's get_ende_bleu.sh; no smoothing, as in multi-bleu.
    See compound_tokens for the words. UserError where sacremoses is not installed.
    """
    split = [*map(compound_tokens, _streams(references))]
    score = _score("BLEU", BLEU(tokenize="none", smooth_method="none", force=True), compound_tokens(hypotheses), split)
    return replace(score, signature=score.signature.replace("tok:none", "tok:moses-de+compound-split"))


def compound_tokens(lines: Sequence[str]) -> list[str]:
    """The tokens of each line, apart by spaces, as get_ende_bleu.sh counts them.

    s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g on Moses' tokens, in which nothing is escaped (&quot; and its like): that would
    change both sides of a score alike.
    """
    tokenize = optional("sacremoses", "moses").MosesTokenizer("de").tokenize
    tokens = (tokenize(line, escape=False, return_str=True) for line in lines)
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", each) for each in tokens]


def chrf(hypotheses: Sequence[str], references: References) -> Score:
    """Corpus chrF2 of raw lines."""
    return _score("chrF2", CHRF(), hypotheses, references)


def comet(model: str, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """COMET of raw lines (Rei et al. 2020), times 100; model: a checkpoint's path, or its name on the hub.

    Raises UserError where the package unbabel-comet is not installed or has no such model.
    """
    _check_aligned(hypotheses, references)
    if len(sources) != len(hypotheses):
        raise UserError(f"{len(sources):,} source lines for {len(hypotheses):,} translations: one for each is needed")
    import torch

    package = _comet_package()
    try:
        path = model if Path(model).is_file() else package.download_model(model)
    except Exception as error:  # of any kind: no network, no such name, terms that were not accepted
        raise UserError(
            f"--comet {model}: is not a file and cannot be downloaded ({' '.join(str(error).split())})"
        ) from None
    lines = [{"src": src, "mt": mt, "ref": ref} for src, mt, ref in zip(sources, hypotheses, references)]
    gpus = int(torch.cuda.is_available())
    predicted = package.load_from_checkpoint(path).predict(lines, batch_size=16, gpus=gpus, progress_bar=False)
    return Score(100 * float(predicted.system_score), f"COMET|{model}|version:{version('unbabel-comet') or 'unknown'}")


def _comet_package() -> Any:
    try:
        import comet
    except ImportError:
        raise UserError("--comet needs the package unbabel-comet: pip install unbabel-comet") from None
    return comet


def ter(hypotheses: Sequence[str], references: References) -> Score:
    """Corpus TER of raw lines: edits and shifts a reference word, in per cent; the lower the better."""
    return _score("TER", TER(), hypotheses, references)


def _streams(references: References) -> list[Sequence[str]]:
    """A list of lines for each reference of a sentence."""
    return [references] if isinstance(next(iter(references), ""), str) else list(references)  # type: ignore[list-item]


def _score(name: str, metric: BLEU | CHRF | TER, hypotheses: Sequence[str], references: References) -> Score:
    streams = _streams(references)
    for each in streams:
        _check_aligned(hypotheses, each)
    value = metric.corpus_score(hypotheses, streams).score
    return Score(value, f"{name}|{metric.get_signature()}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two systems on the same lines, and whether their difference may be chance."""

    baseline: float
    system: float
    p_value: float
    """The share of resampled test sets (or of random exchanges of lines) whose difference is larger, as sacreBLEU
    counts it: centred on the observed one in the bootstrap, ties left out."""
    signature: str


PAIRED_TESTS = {"bootstrap": ("bs", 1_000), "randomization": ("ar", 10_000)}
"""Test -> sacreBLEU's name of it and its number of trials."""


def compare(
    hypotheses: Sequence[str],
    baseline: Sequence[str],
    references: References,
    *,
    test: str = "bootstrap",
    tokenize: str = "13a",
    with_ter: bool = False,
) -> dict[str, Comparison]:
    """BLEU, chrF and, asked for, TER of two systems by sacreBLEU's paired test; test: one of PAIRED_TESTS.

    ValueError when the line counts differ.
    """
    streams = _streams(references)
    for each in streams:
        _check_aligned(hypotheses, each)
        _check_aligned(baseline, each)
    kind, trials = PAIRED_TESTS[test]
    metrics = {
        "bleu": BLEU(tokenize=tokenize, force=True, references=streams),
        "chrf": CHRF(references=streams),
        **({"ter": TER(references=streams)} if with_ter else {}),
    }
    systems: list[tuple[str, Sequence[str]]] = [("baseline", baseline), ("system", hypotheses)]
    # no references: the metrics hold them already
    signatures, results = PairedTest(systems, metrics, references=None, test_type=kind, n_samples=trials)()
    comparisons = {}
    for name, title in zip(metrics, signatures):  # sacreBLEU's names of the metrics, in the order given
        before, after = (each for each in results[title] if isinstance(each, Result))
        signature = f"{title}|{signatures[title]}"
        comparisons[name] = Comparison(before.score, after.score, after.p_value or 0.0, signature)
    return comparisons


def _check_aligned(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references: one for each is needed")
