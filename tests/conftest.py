"""Shared by all tests: the interpreter switch, and where real corpora lie."""

import os
from pathlib import Path

import pytest
import torch

# Before any kernel is imported: without a GPU the kernels run on CPU tensors through Triton's interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora: $FASTTFM_DATA, else shared/data beside the project."""
    folder = Path(os.environ.get("FASTTFM_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real corpora: {folder} does not exist (set FASTTFM_DATA)")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
