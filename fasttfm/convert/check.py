"""Verifies an import or export: the other tool translates lines greedily, up to _LONGEST tokens, and each of these must
be the likeliest by our model.

Lines come from the validation text if the model's training recorded it, otherwise from random pieces of the source
vocabulary with a fixed seed. Tokens whose logits are equal up to rounding count as equal.
"""

import contextlib
import io
import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttfm.convert.ctranslate2_read import vocabulary
from fasttfm.convert.exchange import NEVER, Model, piece_names
from fasttfm.convert.tokenizer_json import SPECIAL_PIECES
from fasttfm.convert.weight_files import foreign_errors
from fasttfm.data.corpus import read_lines
from fasttfm.data.tokenizer import BOS, EOS, PAD, Tokenizer
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.model_dir import DATA_FILE
from fasttfm.store.weights import with_weights
from fasttfm.system.files import read_json, read_plain_yaml

_LINES, _TEXTS, _PIECES, _LONGEST = 100, 3, 7, 16
_TIE = 0.02
"""Largest difference of two logits that rounding may cause; both tools dequantize weights to float32."""
_PACKAGES = {
    "ctranslate2": "ctranslate2", "marian-hf": "transformers", "m2m100": "transformers", "onnx": "onnxruntime",
}  # fmt: skip


@contextlib.contextmanager
def computing_in(package: str, does: str) -> Iterator[None]:
    """Run another package without gradients and progress bars; UserError if it fails.

    does: the failed action in the message, such as "load this model".
    """
    with (
        foreign_errors(f"{package} cannot {does}", "--no-check skips the comparison"),
        torch.inference_mode(),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def check(model: Model, form: str, folder: Path, languages: Sequence[str | None] = (None, None)) -> list[str]:
    """Compare translations of our model with those of the other tool on `folder`; returns notes.

    languages: source and target language of M2M-100 and NLLB. Raises UserError if the other tool cannot load the
    directory or translates differently.
    """
    package = _PACKAGES.get(form)
    if package is None:
        return []
    if find_spec(package) is None:
        return [f"not compared with {package}, which is not installed"]
    lines = _validation_lines(model) or _texts(model.source_tokenizer)
    with computing_in(package, "translate with this model"):
        if form == "ctranslate2":
            theirs = _by_ctranslate2(model, folder, lines)
        elif form == "onnx":
            theirs = [_by_onnxruntime(model, folder, line) for line in lines]
        else:
            theirs = _by_transformers(model, form, folder, lines, languages)
    network = with_weights(lambda: Transformer(model.config), model.weights, folder).eval()
    for line, translation in zip(lines, theirs, strict=True):
        if not _agree(model, network, line, translation):
            raise UserError(
                f"{package} translates {line!r} differently from this model: please report it; --no-check skips the "
                "comparison"
            )
    return [f"{len(lines)} texts are translated as {package} translates them"]


def _validation_lines(model: Model) -> list[str]:
    """Return source lines of the model's validation set, if it is one pair of files that still exists."""
    described = None if model.folder is None else model.folder / DATA_FILE
    if described is None or not described.is_file():
        return []
    files = read_plain_yaml(described).get("files")
    if not isinstance(files, list) or len(files) != 4 or not Path(str(files[2])).is_file():
        return []
    try:
        lines = [line for line in read_lines(files[2]) if line.strip()]
    except UserError:  # changed since training
        return []
    count = min(_LINES, len(lines))
    return [lines[index * len(lines) // count] for index in range(count)]


def _texts(tokenizer: Tokenizer) -> list[str]:
    """Draw texts of random pieces."""
    generator = random.Random(1)
    pieces = tokenizer.pieces(range(len(tokenizer)))[EOS + 1 :]
    words = [piece for piece in pieces if piece.strip("\u2581").isalnum()] or pieces
    return ["".join(generator.choices(words, k=_PIECES)).replace("\u2581", " ").strip() for _ in range(_TEXTS)]


def _source(model: Model, line: str) -> list[int]:
    """Encode a line with the prefix and end token of sources."""
    tokenizer = model.source_tokenizer
    return [*tokenizer.prefix, *tokenizer.encode(line), *tokenizer.source_end]


def _suppressed(model: Model) -> list[int]:
    """Return the tokens that our search never produces but the other tool might."""
    bias = model.weights.get("output.bias")
    return [PAD, *([BOS] if bias is None or bias[BOS] > NEVER else [])]


def _by_ctranslate2(model: Model, folder: Path, lines: Sequence[str]) -> list[list[int]]:
    import ctranslate2

    if model.folder is None:  # an import, whose pieces are in our order
        source, target = (each.pieces(range(len(each))) for each in model.tokenizers)
    else:
        source, target = (vocabulary(folder, side) for side in ("source", "target"))
    their_pieces = vocabulary(folder, "target")
    suppressed = [[target[token]] for token in _suppressed(model) if target[token] in their_pieces]
    ended = len(model.source_tokenizer.source_end) if read_json(folder / "config.json").get("add_source_eos") else 0
    prefix = [target[token] for token in model.target_tokenizer.prefix]
    results = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1).translate_batch(
        [[source[token] for token in ids[: len(ids) - ended]] for ids in (_source(model, line) for line in lines)],
        target_prefix=[prefix] * len(lines) if prefix else None,
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=_LONGEST,
        suppress_sequences=suppressed or None,
    )
    return [_ids(target, each.hypotheses[0]) for each in results]


def _by_onnxruntime(model: Model, folder: Path, line: str) -> list[int]:
    import onnxruntime

    search = read_json(folder / "search.json")
    encoder, step = (onnxruntime.InferenceSession(str(folder / f"{name}.onnx")) for name in ("encoder", "step"))
    source = np.array([_source(model, line)])
    mask = np.ones(source.shape, dtype=bool)
    keys, values = encoder.run(None, {"source": source, "source_mask": mask})
    memory = {"memory_keys": keys, "memory_values": values, "source_mask": mask}
    past = [np.zeros((search["layers"], 1, search["heads"], 0, search["head_size"]), np.float32)] * 2
    token, forced = search["start"], [*search["target_prefix"]]
    tokens: list[int] = []
    while len(tokens) < _LONGEST and token != EOS:
        logits, *past = step.run(None, {"tokens": np.array([token]), "keys": past[0], "values": past[1], **memory})
        logits[:, _suppressed(model)] = -np.inf
        token = forced.pop(0) if forced else int(logits.argmax())
        tokens.append(token)
    return tokens[:-1] if token == EOS else tokens


def _by_transformers(
    model: Model, form: str, folder: Path, lines: Sequence[str], languages: Sequence[str | None]
) -> list[list[int]]:
    import transformers

    ours = model.target_tokenizer  # an import has their names, an export those that were written
    names = ours.pieces(range(len(ours))) if model.folder is None else piece_names(ours, SPECIAL_PIECES)
    forced: dict[str, Any] = {}
    tokenizer: Any
    if form == "m2m100":
        source, target = languages
        options = {"src_lang": source, "tgt_lang": target, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
        code = getattr(tokenizer, "lang_code_to_token", {}).get(target, target)
        forced["forced_bos_token_id"] = tokenizer.convert_tokens_to_ids(code)
        network: Any = transformers.M2M100ForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32)
    else:
        tokenizer = transformers.MarianTokenizer.from_pretrained(str(folder), local_files_only=True)
        network = transformers.MarianMTModel.from_pretrained(str(folder), dtype=torch.float32)
    suppressed = tokenizer.convert_tokens_to_ids([names[token] for token in _suppressed(model)])
    rows = []
    for line in lines:
        (row,) = network.eval().generate(
            **tokenizer([line], return_tensors="pt"), num_beams=1, do_sample=False, max_new_tokens=_LONGEST,
            max_length=None, min_new_tokens=0, min_length=0, repetition_penalty=1.0, no_repeat_ngram_size=0,
            bad_words_ids=None, suppress_tokens=suppressed, forced_eos_token_id=None, **forced,
        )  # fmt: skip
        rows.append(_ids(names, tokenizer.convert_ids_to_tokens(row[1:].tolist())))
    return rows


def _ids(names: Sequence[str], pieces: Sequence[str]) -> list[int]:
    """Return our ids of their pieces up to the end of the sentence; -1 for unknown pieces."""
    id_of = {name: i for i, name in reversed(list(enumerate(names)))}
    ids = [id_of.get(str(piece), -1) for piece in pieces]
    return ids[: ids.index(EOS)] if EOS in ids else ids


def _agree(model: Model, network: Transformer, line: str, theirs: list[int]) -> bool:
    """Return whether each of their tokens is the likeliest by our network, ties of logits aside."""
    source, prefix = _source(model, line), model.target_tokenizer.prefix
    tokens = [*(theirs[len(prefix) :] if theirs[: len(prefix)] == prefix else theirs), EOS]
    tokens = tokens[: _LONGEST - 2]  # the length limit may include the end token, and the prefix
    if -1 in tokens:
        return False
    with torch.inference_mode():
        target = torch.tensor([[BOS, *prefix, *tokens[:-1]]], device="cpu")
        logits = network(torch.tensor([source], device="cpu"), target)[0, len(prefix) :]  # (L, V)
        logits[:, [PAD, BOS]] = -torch.inf
        return bool((logits.amax(dim=1) - logits[range(len(tokens)), tokens] < _TIE).all())
