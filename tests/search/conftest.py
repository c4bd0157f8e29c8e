"""A small tokenizer, and a translator with a table model."""

import pytest

from fasttfm.data.tokenizer import Tokenizer, train_tokenizer
from fasttfm.translate.translator import Translator

from .device_tables import either_engine  # noqa: F401 a fixture
from .table_model import TableModel

TEXT = [
    "a dog runs over the green grass",
    "two men sit in a small boat",
    "ein Hund läuft über die grüne Wiese",
    "zwei Männer sitzen in einem kleinen Boot",
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=340)


@pytest.fixture
def translator(tokenizer) -> Translator:
    return Translator(TableModel(len(tokenizer), end=6.0), tokenizer, tokenizer)
