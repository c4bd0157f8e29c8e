"""Changes of PTX and of machine code that must be noticed."""

import re
from collections.abc import Callable


def replaced(pattern: str, by: str = "", count: int = 0) -> Callable[[str], str]:
    """A function that replaces what matches in a text, everywhere or `count` times; at least once."""

    def rewrite(text: str) -> str:
        made, found = re.subn(pattern, by, text, count=count)
        assert found, pattern
        return made

    return rewrite


def without_lines(pattern: str) -> Callable[[str], str]:
    return replaced(rf"(?m)^.*(?:{pattern}).*$")


WAIT = r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;"


def kinds(machine) -> set[str]:
    return {fault.kind for fault in machine.faults}
