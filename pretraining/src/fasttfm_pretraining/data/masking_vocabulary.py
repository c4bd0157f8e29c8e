"""Special tokens and word beginnings of a tokenizer, for masking."""

import numpy as np

from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm_pretraining.data.masking import MaskingVocabulary
from fasttfm_pretraining.data.text_tokenizer import ByteTokenizer, ImportedTokenizer, TextTokenizer

_WORD_MARKS = ("\u2581", "\u0120", "\u010a")
"""SentencePiece's for a space; GPT-2's for a space and for a line break."""
_CONTINUES = "##"
"""WordPiece's prefix of pieces that continue a word."""
_SPECIAL = {
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<unk>", "<s>", "</s>", "<mask>", "<|endoftext|>",
}  # fmt: skip
_BEGINS = ("[CLS]", "<s>", "<bos>")


def masking_vocabulary(tokenizer: TextTokenizer) -> MaskingVocabulary:
    """Special tokens and word beginnings of a tokenizer. Raises ValueError if it has no mask token.

    Our vocabularies use start and end of sentence as [CLS] and [SEP]; those of other tools are looked up by name.
    """
    if tokenizer.mask is None:
        raise ValueError("the vocabulary has no piece that stands for a hidden token")
    size = len(tokenizer)
    special = {PAD, UNK, BOS, EOS, tokenizer.mask}
    begin = BOS
    pieces = tokenizer.pieces()
    if isinstance(tokenizer, ImportedTokenizer):
        begin = next((pieces.index(piece) for piece in _BEGINS if piece in pieces), tokenizer.end)
        special = {number for number, piece in enumerate(pieces) if piece in _SPECIAL}
        special |= {begin, tokenizer.end, tokenizer.mask, *tokenizer.textless(size)}
    if isinstance(tokenizer, ByteTokenizer):
        begins = [piece in (" ", "\n") for piece in pieces]  # a word takes the space before it
    elif any(piece.startswith(_CONTINUES) for piece in pieces):
        begins = [not piece.startswith(_CONTINUES) for piece in pieces]
    else:
        begins = [piece.startswith(_WORD_MARKS) or piece in ("\n", "<0x0A>") for piece in pieces]
    return MaskingVocabulary(
        size=size,
        begin=begin,
        end=tokenizer.end,
        mask=tokenizer.mask,
        is_special=np.isin(np.arange(size), sorted(special)),
        begins_word=np.array(begins),
    )
