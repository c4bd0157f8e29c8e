"""--quiet, --json and --preset list behave alike in all commands."""

import io
import json
import sys
import types

import pytest
import torch
from any_command import PARSERS

from fasttfm.cli.main import main
from fasttfm.cli.output import Output

LONG = (
    *("prepare", "train", "translate", "score", "average", "export", "import", "quantize", "tune"),
    *("finetune", "lm", "mlm", "recipe"),
)
"""Commands that run for long."""


def test_long_running_commands_have_json_and_quiet():
    found = {words: PARSERS[words]._option_string_actions for words in PARSERS if words.split()[0] in LONG}
    assert {words.split()[0] for words in found} == {*LONG}
    assert [words for words, flags in found.items() if not {"--json", "--quiet"} <= set(flags)] == []


def test_progress_is_a_line_per_tenth_without_a_terminal(capsys):
    move = Output("prepare").progress("training text", "pairs")
    for done in range(50, 1001, 50):
        move(done, 1000)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("fasttfm prepare: training text: 100 of 1,000 pairs, about ")
    assert lines[-1] == "fasttfm prepare: training text: 1,000 of 1,000 pairs"
    for output, done in ((Output("prepare"), 1000), (Output("prepare", quiet=True), 500)):
        output.progress("training text", "pairs")(done, 1000)
    assert capsys.readouterr().out == "", "done at once, or --quiet"


def test_notes_go_to_standard_output_or_with_json_to_standard_error(capsys):
    for quiet, as_json, out, err in ((0, 0, "a", ""), (0, 1, "", "a"), (1, 0, "", ""), (1, 1, "", "")):
        output = Output("prepare", quiet=bool(quiet), as_json=bool(as_json))
        output.note("a")
        said = capsys.readouterr()
        assert (said.out, said.err) == tuple(f"fasttfm prepare: {x}\n" if x else "" for x in (out, err))
        output.note("warning: b")
        assert "warning: b" in "".join(capsys.readouterr())
        output.result("all done", out="DIR", pairs=3)
        said = capsys.readouterr().out
        assert json.loads(said) == {"command": "prepare", "out": "DIR", "pairs": 3} if as_json else said == "all done\n"


@pytest.fixture
def json_of(monkeypatch, capsysbinary):
    """Run a command with --json and --quiet; returns the documents on standard output."""

    def run(*words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsysbinary.readouterr()
        assert main([*map(str, words), "--json", "--quiet"]) == 0
        said = capsysbinary.readouterr()
        assert b"tokens/s" not in said.err, "--quiet"
        return [json.loads(line) for line in said.out.decode().splitlines()]

    return run


def test_from_text_to_a_score_every_output_is_json(tmp_path, json_of):
    lines = [f"{a}{b}{c} {c}{a} {b}{a}{c}" for a in "abcdefgh" for b in "ijklmn" for c in "opqr"]
    text = []
    for prefix, part in (("", lines), ("valid-", lines[:3])):
        for side, suffix in (("src", ""), ("tgt", " ja")):
            path = tmp_path / f"{prefix}{side}"
            path.write_text("".join(f"{line}{suffix}\n" for line in part))
            text.append(f"--{prefix}{side}={path}")
    data, model = tmp_path / "data", tmp_path / "model"
    (told,) = json_of("prepare", *text, "--vocab-size", 320, "--out", data)
    assert told["out"] == str(data)
    assert any("training pairs" in note for note in told["notes"])
    small = "--d-model 16 --heads 2 --d-ff 16 --encoder-layers 1 --decoder-layers 1 --max-update 2 --warmup-updates 1"
    words = ["--preset", "demo", "--data", data, "--out", model, *small.split()]
    (told,) = json_of("train", *words, "--workers", 1, "--threads", torch.get_num_threads())
    assert (told["command"], told["model"]) == ("train", str(model))
    told = json_of("translate", model, "--nbest", 2, "--beam", 2, "--workers", 1, stdin="a i o\nb j p\n")
    assert [line["line"] for line in told] == [0, 1]
    assert all(len(line["translations"]) == 2 and {"text", "score"} == set(line["translations"][0]) for line in told)
    told = json_of("translate", model, "--score", tmp_path / "valid-tgt", stdin=(tmp_path / "valid-src").read_text())
    assert [line["line"] for line in told] == [0, 1, 2]
    assert all(line["score"] < 0 for line in told)
    (told,) = json_of("quantize", model, "--out", tmp_path / "int8")
    assert told["bytes"] < told["bytes_before"]
    (told,) = json_of("export", model, "--format", "pretrained", "--out", tmp_path / "pretrained")
    assert told["format"] == "pretrained"


def test_score_takes_comet_where_it_is_installed(tmp_path, monkeypatch, json_of):
    for name, lines in (("src", "a\nb\n"), ("ref", "A\nB\n")):
        (tmp_path / name).write_text(lines)
    asked = []

    class Model:
        def predict(self, lines, **options):
            asked.extend(lines)
            return types.SimpleNamespace(system_score=0.8125)

    fake = types.SimpleNamespace(
        download_model=lambda name: f"/there/{name}", load_from_checkpoint=lambda path: Model()
    )
    monkeypatch.setitem(sys.modules, "comet", fake)
    files = [f"--{name}={tmp_path / name}" for name in ("ref", "src")]
    (told,) = json_of("score", "--comet", "Unbabel/wmt22-comet-da", *files, stdin="A\nC\n")
    assert told["comet"] == 81.25
    assert told["comet_signature"].startswith("COMET|Unbabel/wmt22-comet-da|")
    assert asked[1] == {"src": "b", "mt": "C", "ref": "B"}
