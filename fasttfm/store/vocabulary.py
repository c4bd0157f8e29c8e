"""Checks that a checkpoint matches its vocabulary: another one of the same size would load and translate nonsense."""

import hashlib
from pathlib import Path

from torch import Tensor

from fasttfm.errors import UserError
from fasttfm.store.checkpoint import META_FILE, MODEL_FILE, read_meta, read_weights
from fasttfm.store.model_dir import Data
from fasttfm.store.steps import resolve_checkpoint
from fasttfm.system.folders import VOCABULARY_FILES


def vocabulary_digest(model_dir: str | Path) -> str | None:
    """SHA-256 of a model directory's vocabulary files; None if it has none."""
    files = [path for path in (Path(model_dir) / name for name in VOCABULARY_FILES) if path.is_file()]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest() if files else None


def checkpoint_vocabulary(checkpoint: Path) -> str | None:
    """Digest of the vocabulary of a checkpoint (a directory, or the model file in it).

    None for weights without it, such as those of another program.
    """
    folder = checkpoint.parent if checkpoint.name == MODEL_FILE and not checkpoint.is_dir() else checkpoint
    return read_meta(folder).get("vocabulary") if (folder / META_FILE).is_file() else None


def check_vocabulary(checkpoint: Path, model_dir: str | Path) -> None:
    """Raise UserError if a checkpoint was trained with another vocabulary than that of `model_dir`."""
    trained_with = checkpoint_vocabulary(checkpoint)
    if trained_with is not None and trained_with != vocabulary_digest(model_dir):
        raise UserError(
            f"{checkpoint}: was trained with another vocabulary than the SentencePiece model in {model_dir}: use a "
            "checkpoint of this model, or restore its SentencePiece model"
        )


def read_checkpoint(model_dir: Path, which: str = "best") -> tuple[dict[str, Tensor], Path]:
    """The weights of a checkpoint named as in resolve_checkpoint(), and its path.

    Looks it up again if a running training deletes it meanwhile. Raises UserError for a missing or damaged file, and
    for another vocabulary.
    """
    before: Path | None = None
    while True:
        saved = None
        try:
            saved = resolve_checkpoint(model_dir, which)
            check_vocabulary(saved, model_dir)
            return read_weights(saved), saved
        except UserError:
            if saved is None or saved.exists() or saved == before:
                raise
            before = saved


def refuse_another_vocabulary(data: Data, model_dir: Path) -> None:
    """Raise UserError if prepared data have another vocabulary than a model directory."""
    files = data.model_files
    for file in files:
        model_file = model_dir / file.name
        if not model_file.is_file() or model_file.read_bytes() != file.read_bytes():
            spm = model_file if len(files) == 1 else model_dir
            raise UserError(f"{data.path}: has another vocabulary than {model_dir}: use fasttfm prepare --spm {spm}")
