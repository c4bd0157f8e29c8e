"""Aligned text tables."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], *, names: int = 1) -> str:
    """Return the lines with aligned columns: the first `names` columns to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
