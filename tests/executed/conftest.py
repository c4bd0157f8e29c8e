"""These tests execute the PTX of the kernels on a CPU, which needs Triton without its interpreter:

TRITON_INTERPRET=0 pytest tests/executed                    as `make test` does
TRITON_INTERPRET=0 pytest tests/executed -m executed        the rest, as `make executed` does
"""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    chosen = "executed" in (config.option.markexpr or "")
    interpreted = pytest.mark.skip(reason="needs TRITON_INTERPRET=0; `make test` runs these on their own")
    long = pytest.mark.skip(reason="runs under `make executed`")
    for item in items:
        if HERE not in item.path.parents:
            continue
        if os.environ.get("TRITON_INTERPRET") != "0":
            item.add_marker(interpreted)
        elif item.get_closest_marker("executed") and not chosen:
            item.add_marker(long)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)
    torch.set_num_threads(1)
