"""Tokenizers of a data or model directory: one for both sides, or one for each."""

from pathlib import Path

from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.errors import UserError
from fasttfm.system.folders import VOCABULARY_FILES, settled

PIECES_FILE = Tokenizer.file_name.format("")
"""The SentencePiece model of both sides."""
TOKENIZER_FILE = "tokenizer.json"
"""A tokenizer in Hugging Face's format."""
MASK_PIECE = "<mask>"
"""The mask token, in vocabularies that have one."""


def load_tokenizers(
    folder: Path, joint: bool | None = None, sizes: tuple[int, int] | None = None
) -> tuple[Tokenizer, Tokenizer]:
    """The source and target tokenizers of a data or model directory; the same object if the vocabulary is joint.

    joint: None infers it from the files. sizes: of the model's vocabularies. Raises UserError for a missing or damaged
    file, and for a tokenizer of another size.
    """
    settled(folder)
    if joint is None:
        joint = not any((folder / name).exists() for name in VOCABULARY_FILES if ".src." in name or ".tgt." in name)
    source = _load(folder, "" if joint else ".src")
    tokenizers = source, source if joint else _load(folder, ".tgt")
    for side, tokenizer, size in zip(("source", "target"), tokenizers, sizes or ()):
        if len(tokenizer) != size:
            pieces = f"{len(tokenizer):,} pieces but its configuration says {size:,}"
            raise UserError(f"{folder}: its {side} vocabulary has {pieces}: copy both from the same training run")
    return tokenizers


def _load(folder: Path, side: str) -> Tokenizer:
    codes = folder / MosesTokenizer.file_name.format(side)
    return MosesTokenizer.load(codes) if codes.exists() else Tokenizer.load(folder / Tokenizer.file_name.format(side))


def save_tokenizers(folder: Path, source: Tokenizer, target: Tokenizer) -> None:
    """Write both tokenizers in the layout of load_tokenizers()."""
    sides = {"": source} if source is target else {".src": source, ".tgt": target}
    for side, tokenizer in sides.items():
        tokenizer.save(folder / tokenizer.file_name.format(side))
