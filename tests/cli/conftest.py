"""One read-only world of situations.py for all tests of the room."""

import pytest
from situations import make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder
