"""--quiet, --json, --help and --preset list behave alike in all commands."""

import argparse
import io
import json
import re
import sys
import types

import pytest
import torch

from fasttfm.cli import main as cli
from fasttfm.cli.output import Output

LONG = (
    *("prepare", "train", "translate", "score", "average", "export", "import", "quantize", "tune"),
    *("finetune", "lm", "mlm", "recipe"),
)


def verbs_of(parser):
    commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return commands[0].choices if commands else {}


def flags_of(name):
    return verbs_of(cli.build_parser([name]))[name]


@pytest.mark.parametrize("name", LONG)
def test_long_running_commands_have_json_and_quiet(name):
    command = flags_of(name)
    for parser in verbs_of(command).values() or [command]:
        assert {"--json", "--quiet"} <= set(parser._option_string_actions), parser.prog


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


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_defaults_are_written_one_way(name):
    parser = flags_of(name)
    parser.shown = None
    text = " ".join(parser.format_help().split())
    wrong = [m for m in re.findall(r".{12}\bdefault: .{12}", text) if "(default: " not in m]
    assert wrong == []
    assert "[default" not in text
    assert "(default)" not in text


LONG_HELP = ["train", "translate", "serve", "prepare", "mlm distill", "lm train", "mlm train", "finetune squad"]


def help_of(capsys, *words):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", LONG_HELP)
def test_help_is_short_with_examples_and_help_all_has_every_flag(command, capsys):
    if command.split()[0] not in cli.COMMANDS:
        pytest.skip("no such command")
    short, whole = help_of(capsys, *command.split(), "--help"), help_of(capsys, *command.split(), "--help-all")
    shown, every = (re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE) for text in (short, whole))
    assert set(shown) < set(every)
    assert len(shown) <= 31
    parser = flags_of(command.split()[0])
    parser = verbs_of(parser)[command.split()[1]] if " " in command else parser
    assert set(every) == {
        a.option_strings[-1 if a.dest == "help" else 0]
        for a in parser._actions
        if a.option_strings and a.help != argparse.SUPPRESS
    }
    examples = short.partition("examples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 3
    for example in examples:
        flags = set(re.findall(r"(--[a-z-]+)", example.partition("#")[0]))
        assert example.startswith(f"  fasttfm {command}")
        assert flags <= set(every), example


def test_validation_settings_are_one_group_and_server_limits_have_defaults(capsys):
    whole = help_of(capsys, "train", "--help-all")
    validation = whole.partition("validation settings:")[2].partition("examples:")[0]
    flags = re.findall(r"^  (--[a-z-]+)", validation, re.MULTILINE)
    assert flags[0] == "--valid-interval-updates"
    assert {"--valid-bleu", "--valid-beam", "--beam", "--length-penalty"} <= set(flags)
    assert "--valid" not in whole.partition("validation settings:")[0]
    limits = help_of(capsys, "serve", "--help-all").partition("limits:")[2]
    assert limits.count("(default:") == limits.count("  --max-") == 8


@pytest.mark.parametrize("command", [["train"], ["lm", "train"], ["mlm", "train"]])
def test_preset_list_describes_each_preset(command, capsys):
    if command[0] not in cli.COMMANDS:
        pytest.skip("no such command")
    assert cli.main([*command, "--preset", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"[\w-]+ {2,}\S.{15,}", line) for line in lines)


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


def test_a_bar_is_drawn_only_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, quiet, seen in ((Terminal(), False, True), (io.StringIO(), False, False), (Terminal(), True, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with Output("tune", quiet=quiet).bar(total=3) as bar:
            bar.update(3)
        assert bool(stream.getvalue()) == seen
        assert not seen or "3/3" in stream.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Training and validation text."""
    folder = tmp_path_factory.mktemp("json")
    lines = [f"{a}{b}{c} {c}{a} {b}{a}{c}" for a in "abcdefgh" for b in "ijklmn" for c in "opqr"]
    for name, part in (("train", lines), ("valid", lines[:3])):
        for side, suffix in (("en", ""), ("de", " ja")):
            (folder / f"{name}.{side}").write_text("".join(f"{line}{suffix}\n" for line in part))
    return folder


def run(words, monkeypatch, capsysbinary, stdin=""):
    """Run a command; returns the JSON documents on standard output, and standard error."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
    capsysbinary.readouterr()
    assert cli.main([str(word) for word in words]) == 0
    said = capsysbinary.readouterr()
    return [json.loads(line) for line in said.out.decode().splitlines()], said.err.decode()


def test_from_text_to_a_score_every_output_is_json(trained, monkeypatch, capsysbinary):
    def json_of(*words, stdin=""):
        return run([*words, "--json", "--quiet"], monkeypatch, capsysbinary, stdin)

    files = {"src": "train.en", "tgt": "train.de", "valid-src": "valid.en", "valid-tgt": "valid.de"}
    text = [f"--{flag}={trained / file}" for flag, file in files.items()]
    data, model = trained / "data", trained / "model"
    (told,), _ = json_of("prepare", *text, "--vocab-size", 320, "--out", data)
    assert told["out"] == str(data)
    assert any("training pairs" in note for note in told["notes"])
    small = "--d-model 16 --heads 2 --d-ff 16 --encoder-layers 1 --decoder-layers 1 --max-update 2 --warmup-updates 1"
    (told,), err = json_of(
        "train", "--preset", "demo", "--data", data, "--out", model, *small.split(),
        "--workers", 1, "--threads", torch.get_num_threads(),
    )  # fmt: skip
    assert told["command"] == "train"
    assert told["model"] == str(model)
    assert "tokens/s" not in err, "--quiet"
    told, _ = json_of("translate", model, "--nbest", 2, "--beam", 2, "--workers", 1, stdin="a i o\nb j p\n")
    assert [line["line"] for line in told] == [0, 1]
    assert all(len(line["translations"]) == 2 and {"text", "score"} == set(line["translations"][0]) for line in told)
    told, _ = json_of("translate", model, "--score", trained / "valid.de", stdin=(trained / "valid.en").read_text())
    assert [line["line"] for line in told] == [0, 1, 2]
    assert all(line["score"] < 0 for line in told)
    (told,), _ = json_of("quantize", model, "--out", trained / "int8")
    assert told["bytes"] < told["bytes_before"]
    (told,), _ = json_of("export", model, "--format", "pretrained", "--out", trained / "pretrained")
    assert told["format"] == "pretrained"


def test_score_takes_comet_where_it_is_installed(tmp_path, monkeypatch, capsysbinary):
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
    words = ["score", "--json", "--comet", "Unbabel/wmt22-comet-da"]
    words += [f"--{name}={tmp_path / name}" for name in ("ref", "src")]
    (told,), _ = run(words, monkeypatch, capsysbinary, "A\nC\n")
    assert told["comet"] == 81.25
    assert told["comet_signature"].startswith("COMET|Unbabel/wmt22-comet-da|")
    assert asked[1] == {"src": "b", "mt": "C", "ref": "B"}
