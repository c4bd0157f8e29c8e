"""The machine's own tests. Those of kernels/ launch Triton's, for which it must not be in its interpreter:

pytest ptx-check/tests                              instructions alone, where TRITON_INTERPRET=1
TRITON_INTERPRET=0 pytest ptx-check/tests           everything
"""

import os
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).parent / "kernels"


def pytest_collection_modifyitems(config, items):
    if "executed" not in (config.option.markexpr or ""):
        long = pytest.mark.skip(reason="runs where the mark is chosen: pytest -m executed")
        for item in items:
            if KERNELS in item.path.parents and item.get_closest_marker("executed"):
                item.add_marker(long)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        skip = pytest.mark.skip(reason="launches kernels, which needs TRITON_INTERPRET=0")
        for item in items:
            if KERNELS in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)
    torch.set_num_threads(1)
