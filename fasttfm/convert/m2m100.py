"""Import of Hugging Face's M2M-100 and NLLB, multilingual models with a token for each language.

https://huggingface.co/docs/transformers/model_doc/m2m_100 and model_doc/nllb
Pre-norm with final norms, and fairseq's sinusoids, which start at the padding id + 1. Source and translation each begin
with the token of their language.
"""

from pathlib import Path
from typing import Any

from fasttfm.convert.bart import KNOWN, bart_config, decoding, read_network, tables
from fasttfm.convert.config_json import read_config, refuse_others, tell_unknown_fields
from fasttfm.convert.exchange import Arrangement, Model, fitting_tokenizer, language_token, refuse_other_corpus
from fasttfm.convert.weight_files import foreign_errors, read_tensors
from fasttfm.data.tokenizer import Vocabulary
from fasttfm.errors import optional
from fasttfm.system.parsing import field

_SENTENCEPIECE = "sentencepiece.bpe.model"


def read(folder: Path, source_language: str | None = None, target_language: str | None = None) -> Model:
    """Read a directory saved by M2M100ForConditionalGeneration and its tokenizer, for one language pair.

    source_language, target_language: the tokenizer's names (en, de; eng_Latn, deu_Latn). Raises UserError for an
    unknown language, and for a file that is missing, truncated or of another architecture.
    """
    path, given = folder / "config.json", read_config(folder, "m2m_100")
    refuse_others(given, path, allowed := {"scale_embedding": (None, True), "is_decoder": (None, False)})
    transformers = optional("transformers", "hf")
    with foreign_errors(f"{folder}: its tokenizer cannot be loaded", "copy its files again"):
        options = {"local_files_only": True, "trust_remote_code": False}
        theirs: Any = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
    weights = read_tensors(folder)
    tell_unknown_fields(given, path, {*KNOWN, *allowed})
    embeddings = tables(weights, given, path)
    table = embeddings[0]
    pieces = [theirs.convert_ids_to_tokens(row) or f"<{row}>" for row in range(len(table))]
    codes = _codes(theirs, pieces)
    start = field(given, "decoder_start_token_id", int, str(path), theirs.eos_token_id)
    arrangement = Arrangement(
        len(table), pad=theirs.pad_token_id, unk=theirs.unk_token_id, start=start, eos=theirs.eos_token_id
    )
    first = field(given, "pad_token_id", int, str(path), 1) + 1
    fields = {"positional_encoding": "tensor2tensor", "first_position": first}
    config = bart_config(given, path, len(arrangement), "relu", norm_first=True, final_norm=True, **fields)
    config, result = read_network(folder, config, weights, (arrangement, arrangement), embeddings, padding=first - 1)
    ours = arrangement.pieces(pieces)
    silent = sorted({*codes.values(), *map(str, theirs.all_special_tokens)} & set(ours))
    sides = []
    for side, language in (("source", source_language), ("target", target_language)):
        vocabulary = Vocabulary(pieces=ours, prefix=[language_token(codes, side, language)], silent=silent)
        sides.append(fitting_tokenizer(folder / _SENTENCEPIECE, vocabulary))
    refuse_other_corpus(folder, sides)
    ids = {"eos": theirs.eos_token_id, "unk": theirs.unk_token_id, "start": start, "pad": theirs.pad_token_id}
    search = decoding(folder, given, **ids)
    return Model(config, result, (sides[0], sides[1]), search)


def _codes(theirs: Any, pieces: list[str]) -> dict[str, str]:
    """Return language -> token."""
    if hasattr(theirs, "lang_code_to_token"):  # M2M-100: en is __en__
        known = set(pieces)
        return {code: token for code, token in theirs.lang_code_to_token.items() if token in known}
    special = {"<s>", "<pad>", "</s>", "<unk>", "<mask>"}
    return {str(token): str(token) for token in theirs.all_special_tokens if str(token) not in special}
