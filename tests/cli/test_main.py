"""The entry point: help of every command, one line for every failure, exit statuses."""

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import types

import pytest
import torch
from any_command import PARSERS

from fasttfm.cli import main as cli
from fasttfm.cli import parser
from fasttfm.errors import Stopped, UserError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Replace the action of `fasttfm score`."""

    def replace(action):
        module = types.SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: action())
        monkeypatch.setitem(sys.modules, "fasttfm.cli.score", module)

    return replace


def raising(error):
    def action():
        raise error

    return action


# Failures and signals


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("a.txt: line 3\nis wrong"), 2, "a.txt: line 3 is wrong"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("saved; start again to resume"), 130, "saved; start again to resume"),
        (Stopped("saved", signal.SIGTERM), 143, "saved"),
        (Stopped(number=signal.SIGTERM), 143, "stopped by SIGTERM"),
        (OSError(28, "No space left", "out/x"), 2, "out/x: No space left: free some space, or write elsewhere"),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x: Permission denied"),
    ],
)
def test_expected_failures_are_one_line_and_a_status(command, capsys, error, status: int, message: str):
    command(raising(error))
    assert cli.main(["score"]) == status
    assert capsys.readouterr() == ("", f"fasttfm score: {message}\n")


def test_out_of_memory_is_one_line(command, capsys):
    for take in (lambda: torch.empty(1 << 55), lambda: torch.empty(1 << 62, 4), raising(MemoryError())):
        command(take)
        assert cli.main(["score"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("fasttfm score: out of memory: close other programs")
        assert said.count("\n") == 1


def test_bugs_keep_their_traceback(command):
    for bug in (KeyError("a bug"), OSError("a bug"), RuntimeError("a bug")):
        command(raising(bug))
        with pytest.raises(type(bug), match="a bug"):
            cli.main(["score"])


def test_a_command_decides_its_own_status(command):
    for returned, status in ((7, 7), (None, 0)):
        command(lambda returned=returned: returned)
        assert cli.main(["score"]) == status
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "handlers are taken back"
    assert cli.main([]) == 2, "no command"


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_under_nohup_a_closed_terminal_ends_nothing(command):
    command(lambda: os.kill(os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(["score"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# The standard streams


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["train --dump-config", "train --help", "--help", "--version"])
@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_a_full_disk_does_not_take_is_one_line(words, buffered, monkeypatch, capsys):
    full = io.TextIOWrapper(open("/dev/full", "wb", -1 if buffered else 0), write_through=not buffered)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main(words.split()) == 2
    where = "fasttfm train" if "train" in words else "fasttfm"
    assert capsys.readouterr().err == f"{where}: No space left on device: free some space, or write elsewhere\n"


def test_closed_streams_are_empty_ones_and_characters_of_other_encodings_are_escaped(command, monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    command(lambda: sys.stderr.write(sys.stdin.read()))
    assert cli.main(["score"]) == 0
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    command(lambda: print("…ü"))
    assert cli.main(["score"]) == 0
    assert sys.stdout.buffer.getvalue() == b"\\u2026\\xfc\n"


# Help and names


def help_of(capsys, *words):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words])
    return capsys.readouterr().out


def test_help_needs_neither_torch_nor_the_kernels():
    program = (
        "import sys; sys.argv = ['fasttfm', '--help']\n"
        "from fasttfm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'triton', 'numpy', 'sentencepiece', 'sacrebleu'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "prepare" in done.stdout


SHORT = ("train", "translate", "serve", "prepare", "mlm distill", "lm train", "mlm train", "finetune squad")


@pytest.mark.parametrize("words", SHORT)
def test_help_is_short_with_examples_and_help_all_has_every_flag(words, capsys):
    short, whole = (help_of(capsys, *words.split(), flag) for flag in ("--help", "--help-all"))
    shown, every = (re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE) for text in (short, whole))
    assert set(shown) < set(every)
    assert len(shown) <= 31
    assert set(every) == {
        a.option_strings[-1 if a.dest == "help" else 0]
        for a in PARSERS[words]._actions
        if a.option_strings and a.help != argparse.SUPPRESS
    }
    examples = short.partition("examples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 3
    for example in examples:
        assert example.startswith(f"  fasttfm {words}")
        assert set(re.findall(r"(--[a-z-]+)", example.partition("#")[0])) <= set(every), example


def test_removed_commands_and_flags_name_their_replacement(refusal_of):
    for command, words in parser._removed().items():
        for word, instead in words.items():
            assert f"{command}: {word} was removed: {instead}" in refusal_of([*command.split()[1:], word])


def test_bash_completes_commands_and_flags(capsys, tmp_path):
    pytest.importorskip("shtab", reason="needs the package shtab")
    (tmp_path / "fasttfm").write_text(help_of(capsys, "--completion", "bash"))
    ask = f"""
    source {tmp_path}/fasttfm
    COMP_WORDS=(fasttfm $1); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    $(complete -p fasttfm | sed 's/.*-F \\([^ ]*\\).*/\\1/') fasttfm
    printf '%s\n' "${{COMPREPLY[@]}}"
    """
    for words, answer in (("transl", "translate"), ("train --max-upd", "--max-update")):
        done = subprocess.run(["bash", "-c", ask, "bash", words], text=True, capture_output=True, check=False)
        assert answer in done.stdout.split(), done.stderr
