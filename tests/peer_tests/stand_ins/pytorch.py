"""fasttfm.nn in torch.nn's place: every module that replace_modules() exchanges is fasttfm.nn's by torch.nn's name."""

import sys
from pathlib import Path

import torch

from fasttfm.interop.replace import PAIRS


def install(folder: Path) -> None:
    """Exchanges the classes of torch.nn wherever torch keeps them by name."""
    for theirs, ours in PAIRS:
        for module in (torch.nn, torch.nn.modules, sys.modules[theirs.__module__]):
            setattr(module, theirs.__name__, ours)
