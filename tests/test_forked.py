"""A forked process is what a started one is: arguments, streams, environment, working folder, signals and status."""

import os
import signal
import subprocess
import sys
from subprocess import PIPE

import forked
import pytest
from waiting import wait_for_end

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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_reach_it_and_are_its_status(number):
    program = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)"
    with forked.Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == [str(process.pid), str(os.getpid())]
        process.send_signal(number)
        assert process.wait() == -number


def test_torch_is_there_before_the_first_line():
    program = "import sys; assert 'torch' in sys.modules and 'triton' not in sys.modules"
    assert forked.run([sys.executable, "-c", program]).returncode == 0


def test_open_files_have_their_numbers_and_a_session_begins():
    reader, writer = os.pipe()
    program = f"import os; os.write({writer}, str(os.getsid(0)).encode())"
    with forked.Popen([sys.executable, "-c", program], pass_fds=[writer], start_new_session=True) as process:
        os.close(writer)
        assert os.read(reader, 20) == str(process.pid).encode()
    os.close(reader)
    assert process.returncode == 0


STARTS = """
import os, subprocess, sys
from fasttfm import processes
child = "import os, sys; print(os.getppid(), 'torch' in sys.modules, flush=True); os.kill(os.getpid(), 9)"
assert processes.subprocess.Popen([sys.executable, "-u", "-c", child]).wait() == -9
print(os.getpid(), *open(f"/proc/self/task/{os.getpid()}/children").read().split(), flush=True)
os.kill(os.getpid(), 15)
"""


def test_what_it_starts_is_forked_too_and_their_server_ends_with_it():
    environment = {**forked.forked_children(), "PYTHONPATH": str(forked.ROOT)}
    done = forked.run([sys.executable, "-c", STARTS], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    parent, loaded, program, server = done.stdout.split()
    assert (parent, loaded) == (program, "True")
    wait_for_end([int(server)])


@pytest.mark.parametrize(
    ("command", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_shell_finds_programs_that_the_server_runs(tmp_path, command, status):
    forked.write_programs(tmp_path)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", f"echo line | python -c '{command}'"], env=environment, check=False)
    assert done.returncode == status
