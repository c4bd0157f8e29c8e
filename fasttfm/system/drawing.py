"""Pictures without a display and without the user's settings: what is drawn looks the same wherever it is drawn."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttfm.errors import optional
from fasttfm.system.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def drawing(**settings: Any) -> "Iterator[Figure]":
    """A matplotlib Figure made with `settings`, to be drawn and saved in the block.

    Agg draws it. MPLBACKEND and matplotlibrc files do not matter, warnings about a font without a sign or a home folder
    that cannot be written are not shown. Raises UserError when matplotlib is not installed.
    """
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matplotlib = _matplotlib()
            # the backend stays: a Figure with its own canvas does not need it
            defaults = {name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"}
            with matplotlib.rc_context(defaults):
                from matplotlib.backends.backend_agg import FigureCanvasAgg
                from matplotlib.figure import Figure

                figure = Figure(**settings)
                FigureCanvasAgg(figure)
                yield figure
    finally:
        logger.setLevel(level)


def save(figure: "Figure", path: Path, kind: str, **settings: Any) -> None:
    """Write a figure as png, svg, ..., all or nothing; settings: of savefig()."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, **settings)
    replace_file(path, picture.getvalue())


def plain_text(path: Path) -> str:
    """A path as text that every font engine takes: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def _matplotlib() -> Any:
    """The package, imported where neither MPLBACKEND nor a matplotlibrc file of the working folder can spoil it."""
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"]
    hidden = {name: os.environ.pop(name) for name in ("MPLBACKEND", "MATPLOTLIBRC") if name in os.environ}
    folder = os.open(".", os.O_RDONLY) if hasattr(os, "fchdir") else None
    try:
        if folder is not None:
            os.chdir(Path(__file__).parent)
        return optional("matplotlib", "plots")
    finally:
        os.environ.update(hidden)
        if folder is not None:
            os.fchdir(folder)
            os.close(folder)
