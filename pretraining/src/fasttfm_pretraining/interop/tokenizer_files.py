"""Tokenizer of a Hugging Face folder: written; or read from tokenizer.json or the older formats.

vocab.txt                  word pieces: BERT, ELECTRA, DistilBERT
vocab.json + merges.txt    byte-level BPE: GPT-2, RoBERTa; GPT-1's BPE over lower-cased words, by config.json
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttfm.convert.tokenizer_json import Frame, bpe, content_of, write_content, write_tokenizer
from fasttfm.data.tokenizer_files import PIECES_FILE, TOKENIZER_FILE
from fasttfm.errors import UserError
from fasttfm.system.files import read_json
from fasttfm.system.parsing import field, shown
from fasttfm_pretraining.data.text_tokenizer import (
    BYTES_FILE,
    ByteTokenizer,
    ImportedTokenizer,
    PieceTokenizer,
    TextTokenizer,
    load_text_tokenizer,
)

_WORD_PIECES, _BPE, _MERGES, _ADDED = "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json"
_SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>", "<mask>")


def read_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer.json of a folder, or the tokenizer of our own export; else convert the older files, whose word
    pieces are lower-cased unless tokenizer_config.json says otherwise.

    Raises UserError if there is none, it is damaged, or `tokenizers` is not installed.
    """
    if any((folder / name).is_file() for name in (TOKENIZER_FILE, PIECES_FILE, BYTES_FILE)):
        return load_text_tokenizer(folder)
    path = next((folder / name for name in (_WORD_PIECES, _BPE) if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{folder}: has neither {TOKENIZER_FILE} nor {_WORD_PIECES} nor {_BPE} with {_MERGES}: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one"
        )
    if path.name == _BPE and not (folder / _MERGES).is_file():
        raise UserError(f"{folder}: has {_BPE} without {_MERGES}: copy that, too")
    says = folder / "tokenizer_config.json"
    settings = read_json(says) if says.is_file() else {}
    try:
        if path.name == _WORD_PIECES:
            made = _word_pieces(path, settings, str(says))
        elif read_json(folder / "config.json").get("model_type") == "openai-gpt":
            made = _first_bpe(folder)
        else:
            made = _byte_level_bpe(folder, field(settings, "add_prefix_space", bool, str(says), False))
        _add_tokens(made, folder / _ADDED)
        return ImportedTokenizer(made.to_str())
    except ImportError:
        raise UserError(f"{path}: needs the package tokenizers: pip install tokenizers") from None
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(f"{path}: is damaged or no vocabulary of its kind ({error})") from None


def _word_pieces(path: Path, settings: dict[str, Any], where: str) -> Any:
    """BERT's, with the settings of tokenizer_config.json."""
    from tokenizers import BertWordPieceTokenizer  # type: ignore[import-untyped, unused-ignore]

    return BertWordPieceTokenizer(
        str(path),
        lowercase=field(settings, "do_lower_case", bool, where, True),
        strip_accents=None if settings.get("strip_accents") is None else field(settings, "strip_accents", bool, where),
        handle_chinese_chars=field(settings, "tokenize_chinese_chars", bool, where, True),
    )


def _add_tokens(made: Any, path: Path) -> None:
    """Tokens of added_tokens.json, if present, with their ids. Raises UserError if the ids would differ."""
    if not path.is_file():
        return
    for piece, number in sorted(read_json(path).items(), key=lambda entry: str(entry[1]).zfill(12)):
        made.add_tokens([piece])
        if made.token_to_id(piece) != number:
            raise UserError(
                f"{path}: {piece!r} has the number {number}, after the vocabulary it is {made.token_to_id(piece)}"
            )


def _byte_level_bpe(folder: Path, prefix_space: bool) -> Any:
    """GPT-2's, and RoBERTa's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary, merges = models.BPE.read_file(str(folder / _BPE), str(folder / _MERGES))
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([piece for piece in _SPECIAL if piece in vocabulary])
    if "<s>" in vocabulary and "</s>" in vocabulary:  # RoBERTa's
        begin, end = (("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"]))
        made.post_processor = processors.RobertaProcessing(end, begin, add_prefix_space=prefix_space)
    return made


def _first_bpe(folder: Path) -> Any:
    """GPT-1's: BERT's words, lower-cased and without accents, and BPE whose last piece of a word ends in </w>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary, merges = models.BPE.read_file(str(folder / _BPE), str(folder / _MERGES))
    made = Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>", unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    made.add_special_tokens(["<unk>"])
    return made


def tell_other_tokens(path: Path, given: Mapping[str, Any], tokenizer: TextTokenizer, *, begins: bool = False) -> None:
    """Warn of special-token ids in the settings that differ from the tokenizer's, which are used.

    begins: whether texts have a start token, as for language models.
    """
    ours = {"eos_token_id": tokenizer.end, "sep_token_id": tokenizer.end, "mask_token_id": tokenizer.mask}
    for name, number in (ours | ({"bos_token_id": tokenizer.begin} if begins else {})).items():
        if given.get(name) not in (None, number, [number]):
            told = f"{path}: says {name} {shown(given[name])}, but its tokenizer {number}, which is taken"
            warnings.warn(told, RuntimeWarning, stacklevel=2)


def write_text_tokenizer(tokenizer: TextTokenizer, folder: Path, frame: Frame = "none") -> list[str]:
    """Write a tokenizer with our ids for read_tokenizer() and AutoTokenizer. Returns lines for the user."""
    tokenizer.save(folder)
    if isinstance(tokenizer, PieceTokenizer):
        return write_tokenizer(tokenizer.tokenizer, folder, frame)
    if isinstance(tokenizer, ByteTokenizer):
        write_content(_of_bytes(tokenizer), folder, frame, masks=True)
    return []


def _of_bytes(tokenizer: ByteTokenizer) -> dict[str, Any]:
    names = tokenizer.pieces()
    vocabulary = {name: number for number, name in enumerate(names[: len(names) - 256])}
    vocabulary |= {_shown(byte): len(names) - 256 + byte for byte in range(256)}
    model = bpe(vocabulary, [], unk_token=None, fuse_unk=False, byte_fallback=False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return content_of(model, normalizer=None, pre_tokenizer=byte_level, decoder=byte_level)


def _shown(byte: int) -> str:
    """GPT-2's character for each byte: itself if printable, else the next one from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in shown else chr(256 + sum(each not in shown for each in range(byte)))
