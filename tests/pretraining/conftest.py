"""What the tests of training have, too."""

from training.conftest import run_ranks

__all__ = ["run_ranks"]
