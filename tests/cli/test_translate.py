"""Command lines of `fasttfm translate`, `quantize` and `plot --attention` on a model directory."""

import io
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from forked import Popen, forked_children
from model_dirs import TEXT, tokenizer, write_model_dir
from safetensors.torch import load_file, save_file
from waiting import PATIENCE

from fasttfm.cli.main import main
from fasttfm.cpu import int8
from fasttfm.data.tokenizer import BOS, EOS, train_tokenizer
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.checkpoint import MODEL_FILE, save_checkpoint
from fasttfm.store.steps import step_folder
from fasttfm.store.weights import model_weights
from fasttfm.translate.terminology import Terminology
from fasttfm.translate.translator import Translator

INPUT = "a dog\n\ntwo men sit in a boat\r\n   \nthe green grass"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A random model with two checkpoints, in a path with a space."""
    settings = {"d_model": 16, "d_ff": 32, "beam": 2, "max_len_b": 3}
    path = write_model_dir(tmp_path_factory.mktemp("with space") / "model", trained=False, **settings)
    (path / "data.yaml").write_text("train:\n  longest_source: 40\n")
    torch.manual_seed(2)
    other = Transformer(Transformer.from_pretrained(path).config)
    save_checkpoint(step_folder(path, 2), model_weights(other), {"step": 2, "best_step": 1})
    return path


@pytest.fixture
def translate(monkeypatch, capsysbinary):
    """Run `fasttfm translate` on a text: (exit status, standard output, lines of standard error)."""

    def run(*arguments, text: str | bytes = INPUT):
        data = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        status = main(["translate", *map(str, arguments)])
        out, err = capsysbinary.readouterr()
        return status, out.decode(), err.decode().splitlines()

    return run


def failure(result) -> str:
    """The one line that a failed command printed."""
    status, _, errors = result
    assert status == 2
    assert len(errors) == 1
    assert errors[0].startswith("fasttfm translate: ")
    return errors[0]


# Lines and settings


def test_one_line_comes_out_for_every_line_that_goes_in(translate, model_dir):
    status, out, errors = translate(model_dir)
    assert (status, errors) == (0, [])
    assert [bool(line) for line in out.split("\n")] == [True, False, True, False, True, False]
    assert translate(model_dir, text="") == (0, "", [])
    assert translate(model_dir, "--precision", "bf16")[1].count("\n") == 5


def test_settings_and_checkpoint_are_the_models_and_flags_win(translate, model_dir, tmp_path):
    (tmp_path / "no terms").write_text("")
    best, last = translate(model_dir), translate(model_dir, "--checkpoint", "last")
    assert best[1] != last[1]
    assert len(translate(model_dir, "--max-len-b", 30, "--min-len", 25)[1]) > len(best[1])
    second = step_folder(model_dir, 2)
    for expected, *words in (
        (best, "--beam", 2, "--max-len-b", 3),
        (best, "--buffer-size", 1),
        (best, "--batch-tokens", 1),
        (best, "--workers", 3),
        (best, "--terminology", tmp_path / "no terms"),
        (best, "--ensemble", model_dir),
        (best, "--checkpoint", "best"),
        (last, "--checkpoint", 2),
        (last, "--checkpoint", second),
        (last, "--checkpoint", second / MODEL_FILE),
    ):
        assert translate(model_dir, *words) == expected, words


def test_a_reader_that_leaves_ends_the_workers_without_a_complaint(model_dir):
    words = [sys.executable, "-m", "fasttfm", "translate", str(model_dir), "--workers", "2", "--buffer-size", "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = Popen(words, env={**forked_children(), "LC_ALL": "C"}, **pipes)
    process.stdin.write("über\n".encode())
    process.stdin.flush()
    assert process.stdout.readline().endswith(b"\n"), "the first line comes while the input is still open"
    process.stdout.close()
    process.stdin.write(b"a dog\n" * 100)
    process.stdin.close()
    assert process.stderr.read() == b"", "ends as soon as nobody, and no worker, can write to it any more"
    assert process.wait(PATIENCE) == 141


# Files beside the input


@pytest.mark.parametrize("settings", [[], ["--nbest", 2], ["--mbr-samples", 3], ["--sampling", "--nbest", 3]])
def test_alignments_have_a_line_for_every_output_line(translate, model_dir, tmp_path, settings):
    text = "a dog\n\ntwo men  sit\tin\u00a0a boat\n \n"
    status, out, errors = translate(model_dir, "--alignment", tmp_path / "links", *settings, text=text)
    assert (status, errors) == (0, [])
    assert out == translate(model_dir, *settings, text=text)[1], "the translations are what they were"
    rows = [line.split(" ||| ") for line in out.splitlines()]
    numbers = [int(row[0]) for row in rows] if "--nbest" in settings else range(4)
    aligned = (tmp_path / "links").read_text(encoding="utf-8").splitlines()
    for number, row, links in zip(numbers, rows, aligned, strict=True):
        source, target = text.splitlines()[number].split(), (row[1] if len(row) > 1 else row[0]).split()
        pairs = [tuple(map(int, link.split("-"))) for link in links.split()]
        assert {word for _, word in pairs} == {*range(len(target))}, "every word of the translation is linked"
        assert all(0 <= word < len(source) for word, _ in pairs)


def test_a_file_of_terms_has_alternatives_and_empty_lines():
    lines = ["dog\tRüde\tHündin", "", "green  grass\tgrünes Gras\r"]
    terms = Terminology.from_lines(lines, "FILE", tokenizer())
    found = terms.required("the Dog on green\tgrass")
    assert [[tokenizer().decode(phrase) for phrase in each] for each in found] == [["Rüde", "Hündin"], ["grünes Gras"]]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["dog"], "line 1: 'dog' has no translation"),
        (["boat\tBoot", "\tHund"], "line 2: the term is empty"),
        (["dog\tHund\t"], "line 1: a translation is empty"),
        (["dog\tHund", "boat\t\u3000"], "line 2: a translation is empty"),
    ],
)
def test_an_incomplete_term_is_refused_by_its_line(lines, told):
    with pytest.raises(UserError, match=f"^FILE, {told}"):
        Terminology.from_lines(lines, "FILE", tokenizer())


STRANGE = ["שלום a dog", "a\u2028dog\x85x", "a\0dog", "a\tdog\x0c", "👩\u200d👩\u200d👧 dog", "\ufeffa dog\r", "\u2581"]


def test_strange_lines_give_one_line_each_with_any_option(translate, model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [*STRANGE, "", "&#10;&#xD800;", "dog " * 600, " ", "a dog"]
    Path("terms").write_text("dog\tH\u2028und\x00\n\u2581\t\x01\n", encoding="utf-8")
    Path("begin").write_text("".join(f"{line[:40]}\n" for line in reversed(lines)), encoding="utf-8")
    options = ["--quiet", "--terminology terms", "--coverage-penalty 0.5", "--diverse-beam-groups 2", "--prefix begin"]
    for words in (*options, "--alignment links", *["--split-sentences en"] * bool(find_spec("sentencex"))):
        status, out, errors = translate(model_dir, *words.split(), text="".join(f"{line}\n" for line in lines))
        assert (status, out.count("\n"), len(out.splitlines())) == (0, len(lines), len(lines)), (words, errors)
        assert [bool(line) for line in out.splitlines()][-2:] == [False, True], words
        assert all(re.search(r"truncated after 512 tokens|longest line of training", error) for error in errors), words
    assert Path("links").read_text().count("\n") == len(lines)


# Warnings


def test_lines_that_may_lose_something_are_counted(translate, model_dir):
    text = "a dog\n" + "dog " * 10_000 + "\nein Hund la\u0308uft\n"
    status, out, errors = translate(model_dir, "--max-source-length", 20, text=text)
    assert (status, out.count("\n"), len(errors)) == (0, 3, 3)
    for told in ("after 20 tokens: 1 line (first: line 2)", "longer than twice", "form C: 1 line (first: line 3)"):
        assert told in "\n".join(errors)


# Refusals


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("none", "does not exist"),
        (".", "has no config.yaml"),
        ("MODEL --nbest 3", "--nbest 3 is more than decoding.beam 2"),
        ("MODEL --workers 0", "--workers: '0' was given, it must be auto or a number from 1"),
        ("MODEL --buffer-size 1000000000000000000000000000000", "below 2^63"),
        ("MODEL --checkpoint average", "fasttfm average"),
        ("MODEL --device cuda:99", "cuda:99"),
        ("MODEL --ensemble OTHER", "its spm.model is not that of"),
        ("MODEL --banned none", "none: no such file"),
        ("MODEL --shortlist none", "none: no such file"),
        ("MODEL --alignment none/x", "there is no directory"),
        ("MODEL --prefix one", "fewer prefixes than lines of the input (line 2 has none)"),
        ("MODEL --terminology terms", "line 1 is not valid UTF-8"),
        ("MODEL --terminology empty --sampling", "needs a beam search"),
        ("MODEL --split-sentences en --nbest 2", "not 2: leave out --nbest"),
        ("MODEL --beam 2 --split-sentences en --prefix x", "--split-sentences and --prefix do not go together"),
        ("MODEL --score empty --beam 2", "--score and --beam do not go together"),
        ("MODEL --score one", "one has fewer lines than the other side of --score"),
        ("MODEL --score nine", "standard input has fewer lines than the other side of --score"),
        ("MODEL", "line 2 is not valid UTF-8"),
    ],
)
def test_unusable_arguments_end_in_one_line(translate, model_dir, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    for name, content in (("terms", b"dog\tR\xfcde\n"), ("empty", b""), ("one", b"ein\n"), ("nine", b"ein\n" * 9)):
        (tmp_path / name).write_bytes(content)
    if "OTHER" in words:
        other = train_tokenizer([*TEXT, "noch ein Satz"], vocab_size=340)
        other.save(shutil.copytree(model_dir, tmp_path / "OTHER") / "spm.model")
    places = {"MODEL": model_dir, "OTHER": Path("OTHER")}
    text = b"a dog\nM\xe4nner\n" if words == "MODEL" else INPUT
    assert told in failure(translate(*(places.get(word, word) for word in words.split()), text=text))


@pytest.mark.parametrize("settings", [["--beam", 4_096], ["--sampling", "--nbest", 10_000_000]])
def test_a_search_larger_than_the_memory_is_refused_before_it_begins(translate, model_dir, settings, monkeypatch):
    monkeypatch.setattr("fasttfm.search.capacity.available_bytes", lambda: 10 << 20)
    told = failure(translate(model_dir, *settings, text="a dog\ntwo men\n"))
    assert re.search(
        rf"{settings[-2]} {settings[-1]:,} needs about [0-9,.]+ GiB for 2 sentences at once, but 0.0 GiB", told
    )
    assert told.endswith(f"give a smaller {settings[-2]} or --batch-tokens")


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        (f"checkpoints/step-000000001/{MODEL_FILE}", lambda old: old[: len(old) // 2], "truncated"),
        ("config.yaml", lambda old: old.replace(b"d_model: 16", b"d_model: 32"), "is for another model"),
        ("config.yaml", lambda old: b"", r"is truncated: it has no model\.vocab_size"),
        ("config.yaml", lambda old: old.replace(b"pad_id: 0", b"pad_id: 3"), r"line \d+: model\.pad_id is 3"),
        ("spm.model", lambda old: b"nothing", "not a SentencePiece model"),
        ("spm.model", lambda old: train_tokenizer(TEXT, vocab_size=310).model, r"310 pieces but .* says 340"),
    ],
)
def test_a_damaged_model_is_refused_by_its_file(model_dir, tmp_path, file, change, told):
    path = shutil.copytree(model_dir, tmp_path / "model") / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=told):
        Translator.from_directory(tmp_path / "model", workers=1)


# Scores, pictures and 8 bits


def test_given_translations_get_the_models_log_probability(translate, model_dir, tmp_path):
    sources, targets = ["a dog", "", "two men sit", "a dog"], ["ein Hund", "die Wiese", "", "ein Hund"]
    (tmp_path / "tgt").write_text("".join(f"{line}\n" for line in targets), encoding="utf-8")
    text = "".join(f"{line}\n" for line in sources)
    status, out, errors = translate(model_dir, "--score", tmp_path / "tgt", "--device", "cpu", text=text)
    assert (status, errors) == (0, [])
    translator = Translator.from_directory(model_dir, device="cpu", workers=1)
    for score, source, target in zip(map(float, out.splitlines()), sources, targets, strict=True):
        source_ids = torch.tensor([[*translator.source_tokenizer.encode(source), EOS]])
        ids = translator.target_tokenizer.encode(target)
        with torch.no_grad():
            logits = translator.model(source_ids, torch.tensor([[BOS, *ids]]))[0].double()
        expected = sum(logits.log_softmax(1)[position, token].item() for position, token in enumerate([*ids, EOS]))
        assert score == pytest.approx(expected, abs=1e-4)


def test_attention_is_drawn_into_the_given_file_alone(model_dir, tmp_path, capsys):
    for name, words in (("attention.png", ["a dog $x$ 日", "--layers", "2"]), ("picture", ["a dog"])):
        assert main(["plot", str(model_dir), "--out", str(tmp_path / name), "--attention", *words]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["attention.png", "picture"]


def test_a_quantized_model_is_smaller_and_translates_as_the_model_does_in_int8(translate, model_dir, tmp_path):
    out = tmp_path / "int8"
    assert main(["quantize", str(model_dir), "--out", str(out)]) == 0
    stored = step_folder(out, 1) / MODEL_FILE
    assert stored.stat().st_size < 0.75 * (step_folder(model_dir, 1) / MODEL_FILE).stat().st_size
    status, in_int8, errors = translate(model_dir, "--precision", "int8")
    assert f"{out}: int8, " in in_int8
    in_int8 = in_int8.partition("before)\n")[2]
    without_route = int8.route() is None  # then float32 takes its place, which a process says once
    assert status == 0
    assert [each for each in errors if not (without_route and "int8 computes in float32" in each)] == []
    assert translate(out)[1] == in_int8
    assert translate(out, "--precision", "int8", "--workers", 2)[1] == in_int8
    assert translate(out, "--precision", "fp32")[0] == 0
    Transformer.from_pretrained(model_dir).save_pretrained(tmp_path / "hub", model_dir=model_dir)  # without config.yaml
    assert main(["quantize", str(tmp_path / "hub"), "--out", str(tmp_path / "hub8")]) == 0
    assert translate(tmp_path / "hub8")[1].partition("before)\n")[2] == in_int8
    scores = [
        [float(line.rsplit("||| ", 1)[1]) for line in translate(model_dir, "--nbest", 2, *words)[1].splitlines()]
        for words in ((), ("--precision", "int8"))
    ]
    assert (scores[0] == scores[1]) == without_route
    assert scores[0] == pytest.approx(scores[1], rel=0.02)


def test_models_that_quantize_and_translate_cannot_use_are_refused(model_dir, tmp_path, refusal_of):
    int8_model = tmp_path / "int8"
    assert main(["quantize", str(model_dir), "--out", str(int8_model)]) == 0
    scaled = load_file(step_folder(int8_model, 1) / MODEL_FILE)
    del scaled[next(name for name in scaled if name.endswith(".scale"))]
    weights = load_file(step_folder(model_dir, 1) / MODEL_FILE)
    for name, content in (("unscaled", scaled), ("short", {key: weights[key].short() for key in weights})):
        save_file(content, tmp_path / f"{name}.safetensors")
    for words, message in (
        ([model_dir, "--checkpoint", tmp_path / "short.safetensors"], "is int16 without a scale"),
        ([model_dir, "--checkpoint", "9"], "checkpoint '9' was not found"),
        ([int8_model], "is already int8"),
        ([tmp_path], "has no config.yaml: give a model directory"),
    ):
        assert message in refusal_of(["quantize", *words, "--out", tmp_path / "x"])
        assert not (tmp_path / "x").exists()
    told = refusal_of(["translate", int8_model, "--checkpoint", tmp_path / "unscaled.safetensors"])
    assert "is int8 but has no float32 scale" in told
