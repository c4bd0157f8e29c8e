"""Options that cannot be asked for together, of `fasttfm translate` and of the server alike."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError

_APART = (
    ("markup", "alignment"),
    ("markup", "split_sentences"),
    ("split_sentences", "prefix"),
    *(("format", other) for other in ("markup", "alignment", "split_sentences", "prefix", "json")),
)


def refuse_together(given: Collection[str], written: Callable[[str], str] = str) -> None:
    """Raise UserError for two of the options given that mean nothing beside one another.

    written: an option's name as the user writes it.
    """
    for one, other in _APART:
        if one in given and other in given:
            raise UserError(f"{written(one)} and {written(other)} do not go together: leave out one of them")


def refuse_config(given: Collection[str], config: DecodingConfig, written: Callable[[str], str] = str) -> None:
    """Raise UserError where a search with this config cannot give what is asked for beside it."""
    for name, what in (("split_sentences", "line"), ("format", "unit")):
        if name in given and config.nbest > 1:
            raise UserError(
                f"{written(name)} gives one translation a {what}, not {config.nbest}: leave out {written('nbest')}"
            )
    if "terminology" in given and (config.sampling or config.mbr_samples or config.diverse_beam_groups > 1):
        raise UserError("terminology needs a beam search: leave out sampling, mbr_samples and diverse_beam_groups")
