"""The table of length penalties: what its columns are of."""

import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks import length_penalties


class Copier:
    @classmethod
    def from_directory(cls, *_, **__):
        return cls()

    def translate(self, sources):
        return list(sources)


def test_the_seconds_are_those_of_the_search_without_its_score(monkeypatch):
    def slow(*_, **__):
        time.sleep(0.3)
        return SimpleNamespace(value=1.0)

    monkeypatch.setattr(length_penalties, "Translator", Copier)
    monkeypatch.setattr(length_penalties, "BEAMS", (1,))
    monkeypatch.setattr(length_penalties, "bleu", slow)
    (row,) = length_penalties.measured(Path(), ["a b"], ["a b"])
    assert row["seconds"] < 0.2
