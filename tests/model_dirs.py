"""Small model directories, trained on a few sentences in a second."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig, build, gather
from fasttfm.data.tokenizer import BOS, EOS, PAD, Tokenizer, train_tokenizer
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.store.checkpoint import save_checkpoint
from fasttfm.store.steps import step_folder
from fasttfm.store.weights import model_weights
from fasttfm.translate import Translator

TEXT = [
    "a dog runs over the green grass",
    "two men sit in a small boat",
    "ein Hund läuft über die grüne Wiese",
    "zwei Männer sitzen in einem kleinen Boot",
]
PAIRS = {
    "a dog": "ein Hund",
    "two men sit in a boat": "zwei Männer sitzen in einem Boot",
    "the green grass": "die grüne Wiese",
    "a small boat": "einem kleinen Boot",
    "a dog runs": "ein Hund läuft",
    "two dogs": "Hund Hund Männer über die Wiese",
}
LINES = [*PAIRS, "a small dog sits", "men run over a boat", "green", "eine grüne Wiese — über!"]
UPDATES = 100
LONGEST = 40
SETTINGS = {
    "d_model": 32,
    "heads": 2,
    "d_ff": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_length": 128,
    "beam": 4,
    "max_len_a": 0.0,
    "max_len_b": LONGEST,
    "length_penalty": "power",
    "alpha": 0.0,
    "min_len": 1,
    "early_stopping": False,
    "dropout": 0.1,
}


def compare(model_dir: Path, texts: Sequence[str], beam: int) -> None:
    """Assert that another tool's translations of LINES equal ours: all in greedy search, those of PAIRS in beam search.

    On other lines, which the model hardly knows, hypotheses have similar scores, and our search, which keeps finished
    hypotheses among the 2K best instead of the K best, may find a better one, but never a worse one.
    """
    translator = Translator.from_directory(model_dir, beam=beam, workers=1)
    ours = translator.translate(LINES)
    equal = len(LINES) if beam == 1 else len(PAIRS)
    assert [text.strip() for text in texts[:equal]] == [text.strip() for text in ours[:equal]]
    assert len(set(ours)) > 3
    assert len(texts) == len(LINES)
    theirs = translator.score(LINES, [text.strip() for text in texts])
    assert all(
        a >= b - 1e-3 for a, b in zip(translator.score(LINES, [text.strip() for text in ours]), theirs, strict=True)
    )


def contents(path: Path, *without: str) -> dict[str, bytes]:
    """Return the content of a file, or of all files below a directory by name, except locks and files `without`."""
    files = [each for each in path.rglob("*") if each.is_file() and each.name not in (".lock", *without)]
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in (files if path.is_dir() else [path])}


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=340)


def resolve(
    preset: str | None = None,
    files: Iterable[str | Path] = (),
    overrides: Mapping[str, Any] | None = None,
    from_data: Mapping[str, int | None] | None = None,
) -> RunConfig:
    """Build the configuration of a translation run as `fasttfm train` does."""
    return build(gather(preset, files, overrides), from_data)


def write_model_dir(path: Path, *, trained: bool = True, **fields: Any) -> Path:
    """Write a model directory like `fasttfm train`. fields: configuration fields other than SETTINGS."""
    path.mkdir(parents=True)
    tokenizer().save(path / "spm.model")
    config = resolve(overrides={**SETTINGS, **fields}, from_data={"vocab_size": len(tokenizer())})
    (path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    model = _model(config.model, trained)
    save_checkpoint(step_folder(path, 1), model_weights(model), {"step": 1, "best_step": 1})
    return path


@cache
def _model(config: TransformerConfig, trained: bool) -> Transformer:
    torch.manual_seed(1)
    model = Transformer(config)
    if trained:
        train(model)
    return model


def train(model: Transformer) -> None:
    """Train a model on PAIRS, so that its outputs have words and end."""
    pad = torch.nn.utils.rnn.pad_sequence
    sources = [torch.tensor([*tokenizer().encode(line), EOS]) for line in PAIRS]
    targets = [torch.tensor([BOS, *tokenizer().encode(line), EOS]) for line in PAIRS.values()]
    source, target = pad(sources, batch_first=True), pad(targets, batch_first=True)
    lengths = torch.tensor([len(each) for each in sources])
    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(UPDATES):
        loss, _, tokens = model.loss(source, target[:, :-1], target[:, 1:], lengths, label_smoothing=0.1)
        (loss / tokens).backward()
        adam.step()
        adam.zero_grad()
    with torch.no_grad():
        for embedding in (model.source_embedding, model.target_embedding):
            embedding.weight[PAD] = 0.0
    model.eval()
