"""Options that cannot be asked for together, of `fasttfm translate` and of the server alike."""

from collections.abc import Callable, Collection

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError

_APART = (
    ("markup", "alignment"),
    ("markup", "split_sentences"),
    ("split_sentences", "prefix"),
    *(("format", other) for other in ("markup", "alignment", "split_sentences", "prefix", "json")),
)
_DEFAULTS = DecodingConfig()
_IN_USE: dict[str, tuple[str, Callable[[DecodingConfig], object]]] = {
    **dict.fromkeys(
        ("sampling_topk", "sampling_topp", "temperature", "sampling_seed"),
        ("sampling", lambda config: config.sampling or config.mbr_samples),
    ),
    "diverse_beam_strength": ("diverse_beam_groups", lambda config: config.diverse_beam_groups > 1),
    "alpha": ("length_penalty", lambda config: config.length_penalty in ("gnmt", "power")),
    "coverage_penalty": ("sampling", lambda config: not config.sampling),
}
"""Setting -> the one that decides whether it does anything, and whether with this configuration it does."""


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


def refuse_idle(given: Collection[str], config: DecodingConfig) -> None:
    """Raise UserError for a setting among those given that does nothing in a search with this config."""
    for name, (other, is_in_use) in _IN_USE.items():
        if name in given and getattr(config, name) != getattr(_DEFAULTS, name) and not is_in_use(config):
            now = str(getattr(config, other)).lower()
            raise UserError(f"{name} does nothing while {other} is {now}: leave it out, or change {other}")
