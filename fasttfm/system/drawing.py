"""matplotlib figures that look the same everywhere: no display, no user settings."""

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
    """A matplotlib Figure(**settings) with an Agg canvas, to be drawn and saved in the block.

    Ignores MPLBACKEND and matplotlibrc files, and suppresses warnings about missing glyphs or a read-only home folder.
    Raises UserError if matplotlib is not installed.
    """
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matplotlib = _matplotlib()
            # keep the backend: a Figure with its own canvas does not use it
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
    """Write a figure atomically. kind: png, svg, ...; settings: arguments of savefig()."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, **settings)
    replace_file(path, picture.getvalue())


def _matplotlib() -> Any:
    """The package, imported without MPLBACKEND and without the working folder's matplotlibrc."""
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
