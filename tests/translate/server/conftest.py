"""A shared model and server; tests that change a server start their own. Nothing is collected without the
server's packages."""

import gc
from importlib.util import find_spec

import pytest
from model_dirs import write_model_dir

PACKAGES = "requests", "starlette", "uvicorn", "prometheus_client"
collect_ignore_glob = [] if all(map(find_spec, PACKAGES)) else ["test_*.py"]


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
    from served import serving

    with serving({"small": translator}) as address:
        yield address


@pytest.fixture(autouse=True, scope="module")
def unfrozen():
    """Unfreeze the objects that engines froze: other files count collected objects."""
    yield
    gc.unfreeze()
