"""A forked process gets what a started one gets (arguments, streams, environment, working folder), and its status comes
back: what no test that starts one would miss."""

import os
import subprocess
import sys

import forked
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

PROGRAM = """
import os, sys
print(sys.argv, os.environ["WORD"], os.getcwd(), sys.stdin.read(), sys.path[0], __name__)
print("told", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("words", [["-c", PROGRAM], ["-m", "program"], ["program.py"]], ids=["-c", "-m", "script"])
def test_what_is_given_arrives_and_the_status_comes_back(tmp_path, words):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = [
        run(
            [sys.executable, *words, "7", "über"],
            input="a line",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "WORD": "word"},
        )
        for run in (forked.run, subprocess.run)
    ]
    ours, theirs = ((each.returncode, each.stdout, each.stderr) for each in done)
    assert ours == theirs
    assert ours[0] == 7


@pytest.mark.parametrize(
    ("command", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_shell_finds_programs_that_the_server_runs(tmp_path, command, status):
    forked.write_programs(tmp_path)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", f"echo line | python -c '{command}'"], env=environment, check=False)
    assert done.returncode == status
