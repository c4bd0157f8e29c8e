"""How a program of the benchmarks ends: with its own status, or in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fasttfm.errors import UserError, interrupted


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """main(arguments): its status; 2 with the message on stderr for what the user must change."""
    try:
        return main(arguments)
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: interrupted; the cases before this one are kept", file=sys.stderr)
        return interrupted()
