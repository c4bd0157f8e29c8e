"""Export of our tokenizers to Hugging Face's tokenizer.json with identical ids; does not need the package tokenizers.

https://huggingface.co/docs/tokenizers/api/models and /api/normalizers
SentencePiece segments line by line and prepends a space to each nonempty line. Here a normalizer inserts these spaces
into the whole text, and line breaks are split off first; pieces and merges are the model's.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fasttfm.data.sentencepiece_model import BPE, BYTE, NORMAL, USER_DEFINED, Normalizer, read_model, read_normalizer
from fasttfm.data.tokenizer import BOS, EOS, HIDDEN_SPACE, PAD, UNK, Tokenizer
from fasttfm.data.tokenizer_files import MASK_PIECE, TOKENIZER_FILE
from fasttfm.system.files import write_file

_SPACE = "\u2581"
SPECIAL_PIECES = {PAD: "<pad>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
"""Names of the special tokens in our vocabularies."""
Frame = Literal["none", "end", "both"]
"""Special tokens around a text: none (GPT), </s> at the end (translation source), or <s> and </s> (BERT)."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, frame: Frame = "none") -> list[str]:
    """Write tokenizer.json and tokenizer_config.json, from which AutoTokenizer gives our ids, to a directory.

    Returns notes; if the tokenizer cannot be represented, nothing is written and a note gives the reason.
    """
    if tokenizer.vocabulary is not None:
        return [f"no {TOKENIZER_FILE} was written, because the vocabulary is another tool's: use its tokenizer"]
    normalizer, (kind, pieces) = read_normalizer(tokenizer.model), read_model(tokenizer.model)
    if kind != BPE or normalizer.rules or not normalizer.adds_space:
        what = "is no BPE" if kind != BPE else "normalizes text"
        return [f"no {TOKENIZER_FILE} was written, because its SentencePiece model {what}: give transformers ids"]
    if whole := [piece for piece, _, kind in pieces if kind == USER_DEFINED and piece != "\n"]:
        return [f"no {TOKENIZER_FILE} was written, because {whole[0]!r} is never cut: give transformers ids"]
    masks = tokenizer.piece_id(MASK_PIECE) is not None
    write_content(_of_pieces(pieces, normalizer), folder, frame, [piece for piece, _, _ in pieces[:4]], masks=masks)
    return []


def write_content(
    content: dict[str, Any], folder: Path, frame: Frame, special: Sequence[str] = (*SPECIAL_PIECES.values(),), *,
    masks: bool,
) -> None:  # fmt: skip
    """Write tokenizer.json and tokenizer_config.json.

    special: the first four pieces; masks: whether the vocabulary has a mask token.
    """
    if frame != "none":
        content["post_processor"] = _frame(frame, special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": special[PAD],
        "unk_token": special[UNK],
        "bos_token": special[BOS],
        "eos_token": special[EOS],
        **({"cls_token": special[BOS], "sep_token": special[EOS]} if frame == "both" else {}),
        **({"mask_token": MASK_PIECE} if masks else {}),
        "split_special_tokens": True,  # a special token's name in a text is text
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *(["token_type_ids"] if frame == "both" else []), "attention_mask"],
    }
    for name, value in ((TOKENIZER_FILE, content), ("tokenizer_config.json", settings)):
        write_file(folder / name, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def _of_pieces(pieces: list[tuple[str, float, int]], normalizer: Normalizer) -> dict[str, Any]:
    model = bpe(
        {piece: number for number, (piece, _, _) in enumerate(pieces)},
        _merges(pieces),
        unk_token=pieces[UNK][0],
        fuse_unk=True,
        byte_fallback=any(kind == BYTE for _, _, kind in pieces),
    )
    steps = [_replace({"String": _SPACE}, HIDDEN_SPACE)]
    if normalizer.drops_spaces:
        steps += [_replace({"Regex": each}, "") for each in (r"\A +", r"(?<=\n) +", r" +(?=\n|\z)")]
        steps += [_replace({"Regex": " {2,}"}, " ")]
    steps += [
        _replace({"String": " "}, _SPACE),
        _replace({"Regex": r"\n(?=[^\n])"}, f"\n{_SPACE}"),
        {"type": "Prepend", "prepend": _SPACE},
        _replace({"Regex": rf"\A{_SPACE}(?=\n|\z)"}, ""),
    ]
    return content_of(
        model,
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer={"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False},
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                _replace({"String": f"\n{_SPACE}"}, "\n"),
                _replace({"String": _SPACE}, " "),
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                _replace({"String": "\r"}, " "),
                _replace({"String": HIDDEN_SPACE}, _SPACE),
            ],
        },
    )


def _merges(pieces: list[tuple[str, float, int]]) -> list[list[str]]:
    """Return pairs of pieces in SentencePiece's merge order: by the score of the merged piece."""
    normal = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    merges = []
    for piece, _ in sorted(normal.items(), key=lambda each: -each[1]):
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [[first, second] for first, second in halves if first in normal and second in normal]
    return merges


def bpe(vocabulary: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """Return a BPE model of tokenizer.json."""
    defaults = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    return {"type": "BPE", **defaults, **options, "vocab": vocabulary, "merges": merges}


def content_of(model: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the content of a tokenizer.json with this model and further parts."""
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None} | {
        **parts,
        "model": model,
    }


def _replace(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _frame(frame: Frame, names: Sequence[str]) -> dict[str, Any]:
    """Return the template <s> text </s>, for pairs <s> text </s> other </s>; without <s> unless frame is "both"."""

    def special(position: int, side: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[position], "type_id": side}}

    first, second = ({"Sequence": {"id": name, "type_id": side}} for side, name in enumerate("AB"))
    single = [*([special(BOS, 0)] if frame == "both" else []), first, special(EOS, 0)]
    tokens = {names[each]: {"id": names[each], "ids": [each], "tokens": [names[each]]} for each in (BOS, EOS)}
    pair = [*single, second, special(EOS, 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
