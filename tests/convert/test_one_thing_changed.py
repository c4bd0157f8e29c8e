"""Import of another tool's directory with one inconspicuous change: refused by name, or reported in a note."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fasttfm.cli.main import main

from .their_folders import Weights, import_words, stored, write_folder

pytest.importorskip("transformers")

Change = Callable[[Path], Any]
ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def weights(change: Callable[[Weights], dict[Any, Any]], *, pickled: bool = False) -> Change:
    def changed(folder: Path) -> None:
        given, write = stored(folder)
        if pickled:
            (folder / "model.safetensors").unlink()
            torch.save(change(given), folder / "pytorch_model.bin")
        else:
            write(folder, change(given))

    return changed


def also(name: str, like: str, change: Callable[[torch.Tensor], Any] = lambda x: x + 1, **kind: bool) -> Change:
    """Add or replace a weight by a function of an existing one."""
    return weights(lambda given: {**given, name: change(given[like])}, **kind)


def one(name: str, change: Callable[[torch.Tensor], Any], **kind: bool) -> Change:
    return also(name, name, change, **kind)


def fields(file: str = "config.json", **values: Any) -> Change:
    """Set fields of a JSON file; ...: take them away."""

    def changed(folder: Path) -> None:
        given = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps({name: each for name, each in given.items() if each is not ...}))

    return changed


def shards(change: Callable[[Weights, dict[str, str]], Any]) -> Change:
    def changed(folder: Path) -> None:
        path = folder / "model.safetensors"
        given = load_file(path)
        path.unlink()
        places = {name: ONE if number % 2 else TWO for number, name in enumerate(given)}
        change(given, places)
        for file in (ONE, TWO):
            save_file({name: each for name, each in given.items() if places.get(name, ONE) == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return changed


def half(name: str) -> Change:
    def changed(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return changed


def llama(folder: Path) -> None:
    """An output beside embeddings that are said to be tied."""
    fields(tie_word_embeddings=True)(folder)
    one("lm_head.weight", lambda x: x + 1)(folder)


def of_a_language_model(folder: Path) -> None:
    path, before, name = folder / "model.bin", b"\x10\0TransformerSpec\0", b"TransformerDecoderSpec"
    whole = path.read_bytes()
    assert whole.count(before) == 1
    path.write_bytes(whole.replace(before, bytes([len(name) + 1, 0]) + name + b"\0"))


LAYER = "h.0.attn.c_proj.weight"
WORDS = "bert.embeddings.word_embeddings.weight"
SEGMENTS = "roberta.embeddings.token_type_embeddings.weight"
OUTPUT = "cls.predictions.decoder.weight"
SHARED = "model.shared.weight"

REFUSED: list[tuple[str, str, Change, str]] = [  # what it is, of which importer, the change, the words
    ("an output that is not the table", "gpt2", also("lm_head.weight", "transformer.wte.weight"),
     "lm_head.weight has other numbers than wte.weight"),
    ("a Llama's output", "llama", llama, "lm_head.weight has other numbers than model.embed_tokens.weight"),
    ("a BERT's output", "bert", also(OUTPUT, WORDS), f"{OUTPUT} has other numbers than"),
    ("a RoBERTa's output", "roberta",
     also("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"), f"{OUTPUT} has other numbers"),
    ("a side's table", "marian-hf", also("model.decoder.embed_tokens.weight", SHARED),
     f"model.decoder.embed_tokens.weight has other numbers than {SHARED}"),
    ("trained positions", "m2m100", also("model.encoder.embed_positions.weights", SHARED),
     "model.encoder.embed_positions.weights is not sinusoids"),
    ("embeddings that are not scaled", "marian-hf", fields(scale_embedding=False), "scale_embedding False is not"),
    ("nothing on the scale of embeddings", "marian-hf", fields(scale_embedding=...),
     "scale_embedding False is not"),
    ("a weight that nobody reads", "marian-hf", also("model.encoder.layers.0.gate.weight", SHARED),
     "has the weights model.encoder.layers.0.gate.weight, for which"),
    ("another end", "marian-hf", fields(eos_token_id=7), "eos_token_id is 7, in the vocabulary it is 0"),
    ("a DistilBERT's norms", "distilbert", fields(layer_norm_eps=0.1), "layer_norm_eps is not a field of DistilBERT"),
    ("another end of searches", "m2m100", fields("generation_config.json", eos_token_id=[2, 7]),
     "generation_config.json: eos_token_id is [2, 7]"),
    ("whole numbers", "gpt2", one(f"transformer.{LAYER}", torch.Tensor.char), f"{LAYER} holds int8"),
    ("a sparse tensor", "bert", one(WORDS, torch.Tensor.to_sparse, pickled=True), f"{WORDS} is a sparse, nested"),
    ("a name that is a number", "bert", also(0, WORDS, pickled=True), "holds more than weights (0)"),
    ("a weight under two names", "gpt2", also(LAYER, f"transformer.{LAYER}"), "two names of one weight"),
    ("a second kind of segment", "roberta", one(SEGMENTS, lambda x: torch.cat([x, x + 1])),
     "token_type_embeddings.weight has 2 rows"),
    ("segments of a DistilBERT", "distilbert", also("distilbert.embeddings.token_type_embeddings.weight",
     "distilbert.embeddings.position_embeddings.weight"), "DistilBERT has no segments"),
    ("a weight that no index has", "bert", shards(lambda given, places: given.update({"unheard.of": torch.ones(3)})),
     f"{ONE}: model.safetensors.index.json disagrees about the weight unheard.of"),
    ("a weight that the index puts elsewhere", "bert", shards(lambda given, places: places.pop("cls.predictions.bias")),
     "disagrees about the weight cls.predictions.bias"),
    ("float64 beyond float32", "marian-hf", one(SHARED, lambda x: x.double() * 1e300), f"{SHARED} contains NaN"),
    ("bytes behind the end", "ctranslate2",
     lambda to: (to / "model.bin").write_bytes((to / "model.bin").read_bytes() + b"x"),
     "model.bin: is truncated or damaged (it has bytes after its end)"),
    ("a language model", "ctranslate2", of_a_language_model,
     "model.bin: is a TransformerDecoderSpec: only encoder-decoder Transformers"),
    ("a step among the weights", "fairseq", weights(lambda given: {**given, "step": 3}),
     "holds more than weights ('step')"),
    ("a weight beside a head", "squad", also("adapter.weight", "bert.embeddings.LayerNorm.bias"), "adapter.weight"),
    *((f"half of {name}", kind, half(name), f"{name}: is truncated") for kind, name in (
        ("gpt2", "model.safetensors"), ("ctranslate2", "model.bin"), ("fairseq", "checkpoint.pt"))),
    ("half of a configuration", "llama", half("config.json"), "config.json: is truncated"),
    ("a gap in a vocabulary", "marian-hf", fields("vocab.json", **{">>deu<<": 999}), "does not number its"),
    ("a number of a hundred bits", "bert", fields(hidden_size=10**30), "has a number of more than"),
    ("half of a vocabulary", "m2m100", half("vocab.json"), "its tokenizer cannot be loaded"),
    ("half of a SentencePiece model", "marian-hf", half("source.spm"), "source.spm"),
    ("a weight that is NaN", "bert", one(WORDS, lambda x: x * torch.nan), f"{WORDS} contains NaN"),
    ("a weight with a row more", "fairseq", one("encoder.layers.0.fc1.weight", lambda x: torch.cat([x, x[:1]])),
     "encoder.layers.0.fc1.weight"),
    ("a weight that is not there", "m2m100",
     weights(lambda given: {name: each for name, each in given.items() if name != SHARED}), SHARED),
]  # fmt: skip
TOLD: list[tuple[str, str, Change, str]] = [
    ("search settings", "marian-hf", fields("generation_config.json", repetition_penalty=1.5),
     "left out its search settings"),
    ("sampling settings", "gpt2", fields("generation_config.json", temperature=0.5, do_sample=True), "temperature 0.5"),
    ("another end of texts", "gpt2", fields(eos_token_id=3), "says eos_token_id 3, but its tokenizer 14"),
    ("another end of pairs", "bert", fields(sep_token_id=9), "says sep_token_id 9, but its tokenizer 3"),
    ("a field of another model", "marian-hf", fields(sliding_window=4, something=None),
     "the fields sliding_window are unknown: they"),
    ("a field that is off", "llama", fields(unheard_of=False), "the fields unheard_of are unknown"),
]  # fmt: skip


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "good"
        write_folder(kind, folder)
        return folder

    return of


@pytest.fixture
def run(tmp_path, good_folder, capsys) -> Callable[[str, Change], tuple[int, str]]:
    def imported(kind: str, change: Change) -> tuple[int, str]:
        shutil.copytree(good_folder(kind), tmp_path / "changed")
        change(tmp_path / "changed")
        capsys.readouterr()
        status = main(import_words(kind, tmp_path / "changed", tmp_path / "out"))
        told = capsys.readouterr()
        return status, told.err if status else told.out

    return imported


@pytest.mark.parametrize(("what", "kind", "change", "message"), REFUSED, ids=[what for what, *_ in REFUSED])
def test_a_change_that_matters_is_refused_by_name(what, kind, change, message, run, tmp_path):
    status, told = run(kind, change)
    assert message in told
    assert (status, len(told.splitlines())) == (2, 1), told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("what", "kind", "change", "message"), TOLD, ids=[what for what, *_ in TOLD])
def test_a_change_that_is_left_out_is_noted_in_the_model_card(what, kind, change, message, run, tmp_path):
    status, told = run(kind, change)
    assert status == 0, told
    assert message in told
    assert message in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_no_code_of_a_pickle_runs(run, tmp_path):
    class Runs:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    status, told = run("bert", weights(lambda given: {**given, "x": Runs()}, pickled=True))
    assert (status, (tmp_path / "ran").exists()) == (2, False)
    assert "pytorch_model.bin: is truncated, or holds more than weights" in told
    assert "it is not loaded" in told
