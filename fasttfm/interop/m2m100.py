"""Hugging Face's M2M-100 and NLLB: many languages in one model, each named by a token.

https://huggingface.co/docs/transformers/model_doc/m2m_100 and model_doc/nllb
Pre-norm with final norms, fairseq's sinusoids, which count from 2. A source begins with the code of its language, a
translation with that of its own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fasttfm.data.tokenizer import Vocabulary
from fasttfm.errors import UserError
from fasttfm.files import read_json
from fasttfm.interop.bart_names import from_bart
from fasttfm.interop.exchange import Arrangement, Model, read_tensors
from fasttfm.interop.marian import bart_config, decoding, tokenizer

_FIRST_POSITION = 2
_SENTENCEPIECE = "sentencepiece.bpe.model"


def read(folder: Path, source_language: str | None = None, target_language: str | None = None) -> Model:
    """The model of a directory as M2M100ForConditionalGeneration and its tokenizer save it, for one pair of languages.

    source_language, target_language: as the tokenizer names them (en, de; eng_Latn, deu_Latn). Raises UserError for an
    unknown one, and for a file that is missing, cut off or of another architecture.
    """
    path = folder / "config.json"
    given = read_json(path)
    if given.get("model_type") != "m2m_100":
        raise UserError(f"{path}: is of type {given.get('model_type')!r}, not m2m_100: give the --format that fits")
    if not given.get("scale_embedding", True):
        raise UserError(f"{path}: scale_embedding is False, which is not supported")
    theirs = _load_tokenizer(folder)
    weights = read_tensors(folder)
    table = next(
        (weights[name] for name in ("model.shared.weight", "model.encoder.embed_tokens.weight") if name in weights),
        None,
    )
    if table is None:
        raise UserError(f"{folder}: its weights have no model.shared.weight: they are of another architecture")
    pieces = [theirs.convert_ids_to_tokens(row) or f"<{row}>" for row in range(len(table))]
    codes = _codes(theirs, pieces)
    start = given.get("decoder_start_token_id", theirs.eos_token_id)
    arrangement = Arrangement(
        len(table), pad=theirs.pad_token_id, unk=theirs.unk_token_id, start=start, eos=theirs.eos_token_id
    )
    config = dataclasses.replace(
        bart_config(given, path, len(arrangement), norm_first=True, final_norm=True, first_position=_FIRST_POSITION),
        positional_encoding="tensor2tensor",
    )
    result = from_bart(weights, config, folder)
    result["target_embedding.weight"] = arrangement.apply(table)
    bias = arrangement.bias(None)
    if bias is not None:
        result["output.bias"] = bias
        config = dataclasses.replace(config, output_bias=True)
    ours = arrangement.pieces(pieces)
    silent = sorted({*codes.values(), *map(str, theirs.all_special_tokens)} & set(ours))
    sides = []
    for side, language in (("source", source_language), ("target", target_language)):
        if language not in codes:
            shown = "none was given" if language is None else f"{language} is unknown"
            raise UserError(f"--{side}-language: {shown}: give one of {', '.join(sorted(codes)[:8])}, ...")
        vocabulary = Vocabulary(pieces=ours, prefix=[codes[language]], silent=silent)
        sides.append(tokenizer(folder / _SENTENCEPIECE, vocabulary))
    return Model(
        config=config,
        weights=result,
        source_tokenizer=sides[0],
        target_tokenizer=sides[1],
        decoding=decoding(folder, given),
    )


def _load_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError('the package transformers is needed: pip install "fasttfm[hf]"') from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of every kind, from several libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{folder}: its tokenizer cannot be loaded ({reason}): copy its files anew") from None


def _codes(theirs: Any, pieces: list[str]) -> dict[str, str]:
    """Language -> its token."""
    if hasattr(theirs, "lang_code_to_token"):  # M2M-100: en is __en__
        return {code: token for code, token in theirs.lang_code_to_token.items() if token in set(pieces)}
    special = {"<s>", "<pad>", "</s>", "<unk>", "<mask>"}
    return {str(token): str(token) for token in theirs.all_special_tokens if str(token) not in special}
