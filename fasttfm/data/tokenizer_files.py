"""The tokenizers of a data or model directory: one for both sides, or source's and target's."""

from pathlib import Path

from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.system.folders import VOCABULARY_FILES, settled

PIECES_FILE = Tokenizer.file_name.format("")
"""The SentencePiece model of both sides."""
TOKENIZER_FILE = "tokenizer.json"
"""Hugging Face's form of a tokenizer."""
MASK_PIECE = "<mask>"
"""The piece of a masked token, in vocabularies that have one."""


def load_tokenizers(folder: Path, joint: bool | None = None) -> tuple[Tokenizer, Tokenizer]:
    """Source's and target's tokenizer in a data or model directory, one object for both where the vocabulary is joint.

    joint: None goes by the files that are there. Raises UserError when a file is missing or damaged.
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
    """Write both sides' tokenizer as load_tokenizers() reads them."""
    sides = {"": source} if source is target else {".src": source, ".tgt": target}
    for side, tokenizer in sides.items():
        tokenizer.save(folder / tokenizer.file_name.format(side))
