"""The tokenizer, the translator and the engines of the searches' tests."""

from tests.search.conftest import either_engine, tokenizer, translator  # noqa: F401 fixtures
