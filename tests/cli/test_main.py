"""The entry point: fast help, one line for every failure, exit statuses."""

import os
import signal
import subprocess
import sys
import time
import types

import pytest
import torch

from fasttfm.cli import main as cli
from fasttfm.cli import parser
from fasttfm.errors import Stopped, UserError


def scoring(run: str) -> list[str]:
    """Command line of a process in which `fasttfm score` calls the `run` that these lines define."""
    program = (
        f"import sys, types\n{run}\n"
        "sys.modules['fasttfm.cli.score'] = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)\n"
        "from fasttfm.cli.main import main\n"
        "sys.exit(main(['score']))"
    )
    return [sys.executable, "-c", program]


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


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("a.txt: line 3\nis wrong"), 2, "fasttfm score: a.txt: line 3 is wrong\n"),
        (KeyboardInterrupt(), 130, "fasttfm score: interrupted\n"),
        (KeyboardInterrupt("saved; start again to resume"), 130, "fasttfm score: saved; start again to resume\n"),
        (Stopped("saved", signal.SIGTERM), 143, "fasttfm score: saved\n"),
        (Stopped(number=signal.SIGTERM), 143, "fasttfm score: stopped by SIGTERM\n"),
        (
            OSError(28, "No space left on device", "out/x"),
            2,
            "fasttfm score: out/x: No space left on device: free some space, or write elsewhere\n",
        ),
        (PermissionError(13, "Permission denied", "/x"), 2, "fasttfm score: /x: Permission denied\n"),
    ],
)
def test_expected_failures_are_one_line_and_a_status(command, capsys, error, status: int, message: str):
    command(raising(error))
    assert cli.main(["score"]) == status
    assert capsys.readouterr() == ("", message)


def test_bugs_keep_their_traceback(command):
    command(raising(KeyError("bug")))
    with pytest.raises(KeyError):
        cli.main(["score"])
    command(raising(OSError("raised by hand")))
    with pytest.raises(OSError, match="by hand"):
        cli.main(["score"])


def test_a_command_decides_its_own_status(command):
    command(lambda: 7)
    assert cli.main(["score"]) == 7
    command(lambda: None)
    assert cli.main(["score"]) == 0


def test_no_command_prints_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "from text to a model:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "told"), [("trian", "did you mean train? fasttfm --help"), ("xyzzy", "is unknown; fasttfm")]
)
def test_an_unknown_command_suggests_the_nearest_name(refusal_of, typed, told):
    error = refusal_of([typed])
    assert f"fasttfm: {typed} is unknown" in error
    assert told in error


def test_removed_commands_and_flags_name_their_replacement(refusal_of):
    for command, words in parser._removed().items():
        for word, instead in words.items():
            assert f"{command}: {word} was removed: {instead}" in refusal_of([*command.split()[1:], word])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert f"usage: fasttfm {name}" in capsys.readouterr().out


def test_help_shows_the_path_from_text_to_a_score_and_every_command_once(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    path = [line.split()[1] for line in lines if line.startswith("  fasttfm ")]
    assert path == ["prepare", "train", "translate", "score"]
    shown = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("  fasttfm ")]
    assert shown == list(cli.COMMANDS)
    assert max(map(len, lines)) <= 120


def complete(shell: str) -> object:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--completion", shell])
    return ended.value.code


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_a_shell_can_complete_every_command_and_flag(shell, capsys):
    pytest.importorskip("shtab", reason="needs the package shtab")
    assert complete(shell) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS)
    assert "max-update" in script
    if shell == "bash":
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_a_command_and_a_flag(capsys, tmp_path):
    pytest.importorskip("shtab", reason="needs the package shtab")
    assert complete("bash") == 0
    (tmp_path / "fasttfm").write_text(capsys.readouterr().out)
    ask = f"""
    source {tmp_path}/fasttfm
    COMP_WORDS=(fasttfm $1); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    $(complete -p fasttfm | sed 's/.*-F \\([^ ]*\\).*/\\1/') fasttfm
    printf '%s\n' "${{COMPREPLY[@]}}"
    """
    for words, answer in (("transl", "translate"), ("train --max-upd", "--max-update")):
        done = subprocess.run(["bash", "-c", ask, "bash", words], text=True, capture_output=True, check=False)
        assert answer in done.stdout.split(), done.stderr


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


def test_version_prints_versions(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert "torch 2." in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX pipes")
def test_a_reader_that_leaves_is_no_error():
    words = scoring("def run(args):\n    for _ in range(100000): print('line')")
    writer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout.readline() == b"line\n"
    writer.stdout.close()
    assert writer.wait() == cli.EXIT_BROKEN_PIPE
    assert writer.stderr.read() == b""
    writer.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["train --dump-config", "train --help", "--help", "--version"])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_a_full_disk_does_not_take_is_one_line(words, buffered):
    with open("/dev/full", "w") as full:
        script = [sys.executable, "-m", "fasttfm.cli.main", *words.split()]
        environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
        result = subprocess.run(script, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert result.returncode == 2
    where = "fasttfm train" if "train" in words else "fasttfm"
    assert result.stderr == f"{where}: No space left on device: free some space, or write elsewhere\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_complaint_that_a_full_disk_does_not_take_leaves_the_status():
    with open("/dev/full", "w") as full:
        script = [sys.executable, "-m", "fasttfm.cli.main", "train", "--dump-confg"]
        assert subprocess.run(script, stderr=full, stdout=subprocess.DEVNULL).returncode == 2


def test_characters_outside_the_terminal_s_encoding_are_escaped(tmp_path):
    words = scoring("def run(args): print('…ü')")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"\\u2026\\xfc\n")


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_a_command_as_ctrl_c_does(command, capsys, number):
    cleaned = []

    def action():
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)  # cut short by the signal
        finally:
            cleaned.append(True)

    command(action)
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        assert cli.main(["score"]) == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert cleaned
    assert capsys.readouterr().err == f"fasttfm score: stopped by {signal.Signals(number).name}\n"


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_under_nohup_a_closed_terminal_ends_nothing(command):
    command(lambda: os.kill(os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(["score"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_standard_streams_are_empty_ones(tmp_path):
    reference = tmp_path / "ref"
    reference.write_text("one line\n")
    command = f'"{sys.executable}" -m fasttfm.cli.main score --ref "{reference}" <&-'
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("fasttfm score: standard input has 0 lines")
    assert result.stderr.count("\n") == 1


def test_out_of_memory_is_one_line(command, capsys):
    for take in (lambda: torch.empty(1 << 55), lambda: torch.empty(1 << 62, 4), raising(MemoryError())):
        command(take)
        assert cli.main(["score"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("fasttfm score: out of memory: close other programs")
        assert said.count("\n") == 1
    command(raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["score"])
