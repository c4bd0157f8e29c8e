"""A small tokenizer, and a translator with a table model."""

import model_dirs
import pytest

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.translate.translator import Translator

from .device_tables import either_engine  # noqa: F401 a fixture
from .table_model import TableModel


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return model_dirs.tokenizer()


@pytest.fixture
def translator(tokenizer) -> Translator:
    return Translator(TableModel(len(tokenizer), end=6.0), tokenizer, tokenizer)
