"""Shared fixtures: tokenizer, translator, engines."""

from tests.search.conftest import either_engine, tokenizer, translator  # noqa: F401 fixtures
