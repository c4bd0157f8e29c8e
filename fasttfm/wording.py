"""Numbers and their nouns in what a user reads."""


def counted(count: int, noun: str) -> str:
    """1 line, 2 lines, 1,000 lines."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
