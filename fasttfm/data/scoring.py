"""Scores of translations against raw references: BLEU, chrF, TER, COMET, each with its signature; significance tests.

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
"""sacreBLEU's tokenizers. The mecab ones need extra packages, the flores ones a download."""
AUTO = "auto"
"""Selects tokenizer_of() the references."""
_BY_SCRIPT = {"japanese": ("ja-mecab", "char"), "chinese": ("zh",), "korean": ("ko-mecab", "char"), "thai": ("char",)}
"""Script -> tokenizers for text that 13a does not split into words, best first."""
_SAMPLE = 1_000
References = Sequence[str] | Sequence[Sequence[str]]
"""Lines of one reference, or a list of lines for each of several references."""


def script_without_words(lines: Sequence[str]) -> str | None:
    """The script of most letters, if it is one that 13a does not split into words; None otherwise."""
    sample = lines[:: max(1, len(lines) // _SAMPLE)]
    letters = Counter(script for line in sample for character in line if (script := _script(character)))
    script = max(letters, key=letters.__getitem__, default="")
    if script in ("japanese", "chinese"):  # kana distinguish Japanese from Chinese
        script = "japanese" if 20 * letters["japanese"] > letters["chinese"] else "chinese"
    return script if script in _BY_SCRIPT else None


def tokenizer_of(lines: Sequence[str], *, packages: bool = True) -> str:
    """The tokenizer for the script of a text. packages: allow tokenizers of installed extra packages."""
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
"""Prefix of a letter's Unicode name -> script; thai stands for all scripts written without spaces like Thai."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score and its signature."""

    value: float
    """0 to 100."""
    signature: str
    """sacreBLEU's signature: metric, case, tokenizer, smoothing, version."""


def bleu(hypotheses: Sequence[str], references: References, *, tokenize: str = "13a", lowercase: bool = False) -> Score:
    """Corpus BLEU of raw, detokenised lines. tokenize: one of TOKENIZERS.

    Raises UserError if the tokenizer's package or data is missing, ValueError if the line counts differ.
    """
    if tokenize not in TOKENIZERS:
        raise UserError(f"the tokenizer {tokenize!r} is unknown: choose from {', '.join(TOKENIZERS)}")
    try:
        return _score("BLEU", BLEU(tokenize=tokenize, lowercase=lowercase, force=True), hypotheses, references)
    except RuntimeError as error:
        install = re.search(r"pip install \S+", str(error))
        remedy = f"install it with {install.group()}" if install else " ".join(str(error).split())
        raise UserError(f"the tokenizer {tokenize} is not installed: {remedy}, or use char or 13a") from None
    except OSError as error:  # flores models are downloaded on first use
        raise UserError(f"the tokenizer {tokenize} could not be downloaded ({error}): use char, intl or 13a") from None


def refuse_missing(tokenize: str, *, compound_split: bool, with_comet: bool) -> None:
    """Raise UserError for missing packages or data before any input is read.

    tokenize: of bleu(). compound_split, with_comet: compound_split_bleu() and comet() will be called.
    """
    bleu([""], [""], tokenize=tokenize)
    if compound_split:
        compound_tokens([])
    if with_comet:
        _comet_package()


def compound_split_bleu(hypotheses: Sequence[str], references: References) -> Score:
    """Tokenized BLEU with split compounds, as papers on WMT14 English-German report it.

    Words joined by a hyphen count as three (tensor2tensor's get_ende_bleu.sh); no smoothing (multi-bleu). See
    compound_tokens() for the tokenization. UserError without sacremoses.
    """
    split = [*map(compound_tokens, _streams(references))]
    score = _score("BLEU", BLEU(tokenize="none", smooth_method="none", force=True), compound_tokens(hypotheses), split)
    return replace(score, signature=score.signature.replace("tok:none", "tok:moses-de+compound-split"))


def compound_tokens(lines: Sequence[str]) -> list[str]:
    """The space-separated tokens of each line, as get_ende_bleu.sh counts them.

    s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g on Moses tokens, without escaping (&quot; etc.), which would change both sides
    of a score equally.
    """
    tokenize = optional("sacremoses", "moses").MosesTokenizer("de").tokenize
    tokens = (tokenize(line, escape=False, return_str=True) for line in lines)
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", each) for each in tokens]


def chrf(hypotheses: Sequence[str], references: References) -> Score:
    """Corpus chrF2 of raw lines."""
    return _score("chrF2", CHRF(), hypotheses, references)


def comet(model: str, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """COMET of raw lines (Rei et al. 2020), times 100. model: path of a checkpoint, or its name on the hub.

    Raises UserError without the package unbabel-comet, and for an unknown model.
    """
    _check_aligned(hypotheses, references)
    if len(sources) != len(hypotheses):
        raise UserError(f"{len(sources):,} source lines for {len(hypotheses):,} translations: give one for each")
    import torch

    package = _comet_package()
    try:
        path = model if Path(model).is_file() else package.download_model(model)
    except Exception as error:  # no network, no such name, licence not accepted, ...
        raise UserError(
            f"--comet {model}: not a file and cannot be downloaded ({' '.join(str(error).split())})"
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
    """Corpus TER of raw lines: edits and shifts per reference word, in percent; lower is better."""
    return _score("TER", TER(), hypotheses, references)


def _streams(references: References) -> list[Sequence[str]]:
    """The lines of each reference."""
    return [references] if isinstance(next(iter(references), ""), str) else list(references)  # type: ignore[list-item]


def _score(name: str, metric: BLEU | CHRF | TER, hypotheses: Sequence[str], references: References) -> Score:
    streams = _streams(references)
    for each in streams:
        _check_aligned(hypotheses, each)
    value = metric.corpus_score(hypotheses, streams).score
    return Score(value, f"{name}|{metric.get_signature()}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A metric of two systems on the same lines, and the significance of their difference."""

    baseline: float
    system: float
    p_value: float
    """Share of resampled test sets (or of random exchanges of lines) with a larger difference, as sacreBLEU counts it:
    centred on the observed difference in the bootstrap, ties excluded."""
    signature: str


PAIRED_TESTS = {"bootstrap": ("bs", 1_000), "randomization": ("ar", 10_000)}
"""Test -> sacreBLEU's name, number of trials."""


def compare(
    hypotheses: Sequence[str],
    baseline: Sequence[str],
    references: References,
    *,
    test: str = "bootstrap",
    tokenize: str = "13a",
    with_ter: bool = False,
) -> dict[str, Comparison]:
    """BLEU, chrF and optionally TER of two systems, with sacreBLEU's paired significance test.

    test: one of PAIRED_TESTS. ValueError if the line counts differ.
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
    # references=None: the metrics have them already
    signatures, results = PairedTest(systems, metrics, references=None, test_type=kind, n_samples=trials)()
    comparisons = {}
    for name, title in zip(metrics, signatures):  # sacreBLEU's titles, in the same order
        before, after = (each for each in results[title] if isinstance(each, Result))
        signature = f"{title}|{signatures[title]}"
        comparisons[name] = Comparison(before.score, after.score, after.p_value or 0.0, signature)
    return comparisons


def _check_aligned(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references: counts must match")
