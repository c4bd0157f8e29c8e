"""Tokenizers of a data or model directory: one for both sides, or one for each."""

from pathlib import Path

from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.system.folders import VOCABULARY_FILES, settled

PIECES_FILE = Tokenizer.file_name.format("")
"""The SentencePiece model of both sides."""
TOKENIZER_FILE = "tokenizer.json"
"""A tokenizer in Hugging Face's format."""
MASK_PIECE = "<mask>"
"""The mask token, in vocabularies that have one."""


def load_tokenizers(folder: Path, joint: bool | None = None) -> tuple[Tokenizer, Tokenizer]:
    """The source and target tokenizers of a data or model directory; the same object if the vocabulary is joint.

    joint: None infers it from the files. Raises UserError for a missing or damaged file.
    """
    settled(folder)
    if joint is None:
        joint = not any((folder / name).exists() for name in VOCABULARY_FILES if ".src." in name or ".tgt." in name)
    if joint:
        tokenizer = _load(folder, "")
        return tokenizer, tokenizer
    return _load(folder, ".src"), _load(folder, ".tgt")


def _load(folder: Path, side: str) -> Tokenizer:
    codes = folder / MosesTokenizer.file_name.format(side)
    return MosesTokenizer.load(codes) if codes.exists() else Tokenizer.load(folder / Tokenizer.file_name.format(side))


def save_tokenizers(folder: Path, source: Tokenizer, target: Tokenizer) -> None:
    """Write both tokenizers in the layout of load_tokenizers()."""
    sides = {"": source} if source is target else {".src": source, ".tgt": target}
    for side, tokenizer in sides.items():
        tokenizer.save(folder / tokenizer.file_name.format(side))
