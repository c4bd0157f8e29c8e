"""Case augmentation: which pairs it takes, what it makes of them, what it leaves, and that resuming is exact."""

import numpy as np
import pytest
import torch
from training.runs import assert_same_weights, log_without_times
from training.tiny import TINY

from fasttfm.config import gather
from fasttfm.data.case import CaseAugment
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.data.prepared import PreparedData
from fasttfm.data.sampling import sentence_keys
from fasttfm.data.tokenizer import Tokenizer, Vocabulary, train_tokenizer
from fasttfm.errors import UserError
from fasttfm.store.steps import saved_steps
from fasttfm.training.run import train

LINES = [f"die straße number {i} isn't red" for i in range(2000)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES, vocab_size=320)


def cased(tokenizer: Tokenizer, lines: list[str], share: float = 1.0, epoch: int = 0, **more) -> list[tuple[str, str]]:
    """The texts of pairs whose sides are the same."""
    ids = [np.array(each) for each in tokenizer.encode_lines(lines)]
    augment = CaseAugment(share, (tokenizer, tokenizer), **more)
    source, target = augment.cased((ids, ids), sentence_keys(3, epoch, np.arange(len(ids)), 0))
    return [(tokenizer.decode(a), tokenizer.decode(b)) for a, b in zip(source, target, strict=True)]


def test_a_pair_in_ten_is_changed_to_capitals_or_a_title(tokenizer):
    kinds = {"plain": 0, "capitals": 0, "title": 0}
    for i, (pair, line) in enumerate(zip(cased(tokenizer, LINES, 0.1), LINES, strict=True)):
        forms = {
            "plain": (line, line),
            "capitals": (f"DIE STRASSE NUMBER {i} ISN'T RED",) * 2,
            "title": (f"Die Straße Number {i} Isn't Red", line),
        }
        kinds[next(kind for kind, form in forms.items() if form == pair)] += 1
    assert kinds["capitals"] == pytest.approx(100, abs=35)
    assert kinds["title"] == pytest.approx(100, abs=35)
    assert cased(tokenizer, LINES, 0.1) == cased(tokenizer, LINES, 0.1) != cased(tokenizer, LINES, 0.1, epoch=1)


def test_tags_and_lines_without_letters_stay(tokenizer):
    lines = ["<2de> red", "42 + 1", "日本語", ""] * 20
    for (source, target), line in zip(cased(tokenizer, lines, tags=["<2de>"]), lines, strict=True):
        assert source in (("<2de> RED", "<2de> Red") if line == "<2de> red" else (line,))
        assert target in (line, line.upper())
        assert source == line.upper() or target == line or line == "<2de> red"


def test_capitals_that_a_vocabulary_cannot_spell_stay():
    small = train_tokenizer(LINES, vocab_size=64, byte_fallback=False)
    assert cased(small, LINES[:50]) == [(line, line) for line in LINES[:50]]


def test_an_imported_vocabulary_is_refused(tokenizer):
    pieces = [tokenizer.pieces([i])[0] for i in range(len(tokenizer))]
    imported = Tokenizer(tokenizer.model, Vocabulary(pieces=pieces, prefix=[]))
    with pytest.raises(UserError, match="--case-augment: an imported vocabulary"):
        CaseAugment(0.1, (tokenizer, imported))


def test_a_run_in_two_sessions_equals_one_in_a_single_session(tmp_path):
    lines = {"train": [f"<2x> Number {i} of many WORDS" for i in range(200)], "valid": ["<2x> Number 3"] * 4}
    for name, text in lines.items():
        (tmp_path / name).write_text("".join(f"{line.removeprefix('<2x> ')}\n" for line in text))
    files = [[tmp_path / name] for name in ("train", "train", "valid", "valid")]
    options = PrepareOptions(vocab_size=400, source_tags=("<2x>",), valid_source_tags=("<2x>",))
    prepare(*files, tmp_path / "DATA", options, say=lambda line: None)
    assert PreparedData.open(tmp_path / "DATA").source_tags == ["<2x>"]

    def session(name: str, **changes: object) -> None:
        values = gather(overrides={**TINY, "case_augment": 0.5, "max_tokens": 600, **changes})
        train(values, tmp_path / "DATA", tmp_path / name, torch.device("cpu"))

    session("plain", case_augment=0.0)
    session("whole")
    session("parts", max_update=5)
    assert saved_steps(tmp_path / "parts") == [4, 5]
    with pytest.raises(UserError, match="case_augment"):
        session("parts", case_augment=0.4)
    session("parts")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "whole", tmp_path / "plain")
    assert log_without_times(tmp_path / "whole")[-1]["step"] == 12
