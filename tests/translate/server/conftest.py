"""One model and one server for all tests of the room; those that change a server start one of their own."""

import gc

import pytest
from model_dirs import write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("served") / "small")


@pytest.fixture(scope="session")
def translator(model_dir):
    from fasttfm.translate import Translator

    return Translator.from_directory(model_dir, workers=1)


@pytest.fixture(scope="session")
def url(translator):
    """The address of a server of this model."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from served import serving

    with serving({"small": translator}) as address:
        yield address


@pytest.fixture(autouse=True, scope="module")
def unfrozen():
    """What engines have frozen is the garbage collector's again: other files count what it collects."""
    yield
    gc.unfreeze()
