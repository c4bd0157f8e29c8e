"""The core's fixtures, and its helpers in tests/, serve these tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from shared_fixtures import *  # noqa: F403
from training.conftest import run_ranks  # noqa: F401
