"""Notices that training has become far slower than it was."""

import statistics

_COLLAPSED = 0.4
"""Share of the usual tokens per second. One busy neighbour on two cores leaves 0.3, two leave next to nothing."""
_ENOUGH = 3
"""Records that say what is usual; the first ones are slow by themselves."""
_IN_A_ROW = 2
"""Slow records before anything is said: a single one may be a backup or a checkpoint's disk."""


class Throughput:
    """Compares each record's tokens per second with the median of those before. Speaks once."""

    def __init__(self) -> None:
        self._usual: list[float] = []
        self._slow = 0
        self._has_spoken = False

    def warning(self, tokens_per_second: float) -> str | None:
        """A line for the user when throughput has collapsed, else None."""
        usual = statistics.median(self._usual) if len(self._usual) >= _ENOUGH else 0.0
        if tokens_per_second >= _COLLAPSED * usual:
            self._usual.append(tokens_per_second)
            self._slow = 0
            return None
        self._slow += 1
        if self._slow < _IN_A_ROW or self._has_spoken:
            return None
        self._has_spoken = True
        return (
            f"warning: only {tokens_per_second:,.0f} tokens/s where {usual:,.0f} were usual: other programs seem to "
            "use the processor; stop them, start them with nice, or go on with a smaller --threads"
        )
