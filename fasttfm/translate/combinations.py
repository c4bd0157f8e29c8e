"""Options that exclude each other or have no effect together, for `fasttfm translate` and the server."""

from collections.abc import Callable, Collection

from fasttfm.config.checks import refuse_stopped
from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError


def _drawn(config: DecodingConfig) -> str | None:
    return "sampling" if config.sampling else "mbr_samples" if config.mbr_samples else None


def _searched(config: DecodingConfig) -> str | None:
    return None if _drawn(config) else "sampling"


_STOPPED_BY: dict[str, Callable[[DecodingConfig], str | None]] = {
    **dict.fromkeys(("sampling_topk", "sampling_topp", "temperature", "sampling_seed"), _searched),
    **dict.fromkeys(("beam", "diverse_beam_groups", "early_stopping", "coverage_penalty"), _drawn),
    "diverse_beam_strength": lambda config: "diverse_beam_groups" if config.diverse_beam_groups == 1 else None,
    "alpha": lambda config: None if config.length_penalty in ("wu", "power") else "length_penalty",
}
"""Setting -> function of a config that returns the setting which disables it, or None."""


def refuse_config(given: Collection[str], config: DecodingConfig, written: Callable[[str], str] = str) -> None:
    """Raise UserError for options that a search with this config does not support.

    written: maps an option's name to the user's spelling.
    """
    split = "split_sentences"
    if split in given and "prefix" in given:
        raise UserError(f"{written(split)} and {written('prefix')} do not go together: leave out one of them")
    if split in given and config.nbest > 1:
        raise UserError(
            f"{written(split)} gives one translation a line, not {config.nbest}: leave out {written('nbest')}"
        )
    if "terminology" in given and (config.sampling or config.mbr_samples or config.diverse_beam_groups > 1):
        raise UserError("terminology needs a beam search: leave out sampling, mbr_samples and diverse_beam_groups")


def refuse_idle(given: Collection[str], config: DecodingConfig, *, is_aligned: bool = True) -> None:
    """Raise UserError for given settings that have no effect in a search with this config.

    is_aligned: whether alignments are requested.
    """
    if "alignment_layer" in given and config.alignment_layer and not (is_aligned or config.coverage_penalty):
        raise UserError("alignment_layer does nothing without alignment or coverage_penalty: leave it out")
    refuse_stopped(given, config, _STOPPED_BY)
