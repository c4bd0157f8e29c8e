"""Memory that a search needs, and that the machine has: a kernel that runs out of memory kills without a word."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.errors import UserError

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def search_bytes(
    model: TransformerConfig, config: DecodingConfig, sentences: int, source_length: int, element_bytes: int
) -> int:
    """About as many bytes as a search over a batch touches when outputs are as long as their sources.

    Counted are the caches of keys and values, logits and log-probabilities in float32, and the random numbers that
    sampling draws before it begins.
    """
    rows = sentences * (config.nbest if config.sampling else config.beam)
    keys_and_values = 2 * model.decoder_layers * model.d_model * source_length * element_bytes
    total = rows * (keys_and_values + 2 * 4 * model.vocab_size) + sentences * keys_and_values
    if config.sampling:
        total += rows * (config.longest_output(source_length) + 1) * 8
    return total


def refuse_more_than_available(
    model: Any, sources: Sequence[Sequence[int]], config: DecodingConfig, device: torch.device, at_once: int
) -> None:
    """Raise UserError when `at_once` searches like that of `sources` need more bytes on a CPU than are free.

    A GPU says by itself what it lacks.
    """
    available = available_bytes() if device.type == "cpu" else None
    element_bytes = next(model.parameters()).element_size()
    needed = at_once * search_bytes(model.config, config, len(sources), max(map(len, sources)), element_bytes)
    if available is None or needed <= available:
        return
    sentences = at_once * len(sources)
    kind, flag = (config.nbest, "--nbest") if config.sampling else (config.beam, "--beam")
    remedy = f"{flag} or --batch-tokens" if sentences > 1 else flag
    raise UserError(
        f"{flag} {kind:,} needs about {needed / 2**30:,.1f} GiB for {sentences:,} "
        f"sentence{'s' if sentences > 1 else ''} at once, but {available / 2**30:,.1f} GiB of memory are free: give a "
        f"smaller {remedy}"
    )


def available_bytes() -> int | None:
    """Memory that this process can still get without swapping, limits of its container included; None if unknown."""
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    for limit, used in _CGROUPS:
        try:
            yield max(0, int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
        except (OSError, ValueError):  # not in a container, or the limit is the word max
            continue
