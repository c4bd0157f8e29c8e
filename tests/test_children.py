"""Child processes: no imports from the working folder, forwarded signals, end with the parent."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE, is_alive, wait_for_end, wait_until

from fasttfm.errors import Stopped
from fasttfm.store.steps import saved_steps
from fasttfm.system.children import calling, command_line, run_to_end

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")

ROOT = Path(__file__).parents[1]
SMALL = "--d-model 16 --heads 2 --d-ff 32 --encoder-layers 1 --decoder-layers 1 --max-tokens 512 --device cpu"
PLANTED = "open({told!r}, 'a').write(__name__ + chr(10))\nraise ImportError('of the working folder')\n"


def test_only_one_module_builds_command_lines_of_children():
    ways = (
        r"sys\.executable|multiprocessing\.(Process|Pool|get_context)|ProcessPoolExecutor|os\.(exec|spawn|posix_spawn)"
    )
    users = [path for path in (ROOT / "fasttfm").rglob("*.py") if re.search(ways, path.read_text(encoding="utf-8"))]
    assert users == [ROOT / "fasttfm" / "system" / "children.py"]


def plant(folder: Path, told: Path) -> None:
    """Write traps named like all modules that Python, torch and the commands import; each logs its import to `told`."""
    known = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names
    names = {name for name in known if name.isidentifier()}
    for name in names | {"sentencepiece", "numpy", "torch", "numba", "sitecustomize"}:
        (folder / f"{name}.py").write_text(PLANTED.format(told=str(told)))


@pytest.mark.whole
def test_no_command_of_a_recipe_and_no_documented_torchrun_imports_from_the_working_folder(tmp_path):
    """The recipe runs all its commands on the built-in corpus, with all cores."""
    folder = tmp_path / "here"
    folder.mkdir()
    plant(folder, folder / "told")
    done = subprocess.run(
        command_line("recipe", "multi30k", "--dry-run", "--train", *SMALL.split(), "--max-update", "3"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^BLEU", done.stdout, re.M), done.stdout
    if (os.cpu_count() or 1) > 1:
        assert "workers with 1 thread each" in done.stderr
    assert not (folder / "told").exists(), (folder / "told").read_text()
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    documented = re.findall(r"^torchrun --nproc-per-node 8 (?!--max)[^\n]*", page, re.M)[0].split()
    (tmp_path / "bin").mkdir()
    for name, module in (("torchrun", "torch.distributed.run"), ("fasttfm", "fasttfm.cli.main")):
        script = tmp_path / "bin" / name  # as written by pip
        call = f"import sys\nsys.path.append({str(ROOT)!r})\nfrom {module} import main\nsys.exit(main())\n"
        # a shebang cannot have a path with a space: the line is a shell command and a Python string
        first = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
        script.write_text(f"{first}\n{call}")
        script.chmod(0o755)
    places = {"8": "2", "DATA": str(folder / "runs" / "multi30k-dry" / "data"), "MODEL": str(tmp_path / "model")}
    done = subprocess.run(
        [*(places.get(word, word) for word in documented), *SMALL.split(), "--max-update", "1", "--no-valid-bleu"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, (folder / "told").exists()) == (0, False), done.stderr
    assert len(saved_steps(tmp_path / "model")) == 1


def test_the_traps_work(tmp_path):
    plant(tmp_path, tmp_path / "told")
    subprocess.run([sys.executable, "-c", "import sentencepiece"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert "sentencepiece" in (tmp_path / "told").read_text().split()


def test_workers_of_searches_and_servers_do_not_import_from_the_working_folder(tmp_path):
    plant(tmp_path, tmp_path / "told")
    done = subprocess.run(
        calling(search, str(ROOT)), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, (tmp_path / "told").exists()) == (0, False), done.stderr


def search(root: str) -> int:
    sys.path.insert(0, root)
    from tests.search import test_workers as tests

    with tests.search_workers(tests.tiny_model(), 2) as workers:
        return len(list(workers.each(tests._who, [(0.0, 1)] * 4))) - 4


def test_the_status_and_the_output_of_a_child_are_returned():
    assert run_to_end(["sh", "-c", "kill -9 $$"]).returncode == -signal.SIGKILL
    assert run_to_end(["sh", "-c", "exit 3"]).returncode == 3
    done = run_to_end(["cat"], input="a\n", stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", None)


def test_a_command_is_terminated_by_until(tmp_path):
    ended = run_to_end(["sh", "-c", f"touch {tmp_path}/done; exec sleep 600"], until=(tmp_path / "done").exists)
    assert ended.returncode == -signal.SIGTERM


def test_no_child_is_left_when_until_fails(tmp_path):
    told = tmp_path / "told"

    def until() -> bool:
        if told.exists() and told.read_text():
            raise RuntimeError("it cannot say")
        return False

    with pytest.raises(RuntimeError, match="it cannot say"):
        run_to_end(["sh", "-c", f"echo $$ > {told}; exec sleep 600"], until=until)
    assert not is_alive(int(told.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_remaining_processes_of_a_stopped_child_are_killed(tmp_path):
    """A shell that is terminated does not forward the signal."""
    told = tmp_path / "told"
    with pytest.raises(Stopped):
        run_to_end(["sh", "-c", f"sleep 600 & echo $! > {told}; kill -TERM $PPID; wait"])
    wait_for_end([int(told.read_text())])


def test_ctrl_z_suspends_a_child_until_its_parent_continues():
    child = "import time, os; print(os.getpid(), flush=True); time.sleep(600)"
    call = f"import sys; from fasttfm.system.children import run_to_end; run_to_end([sys.executable, '-c', {child!r}])"

    def state(process: int) -> str:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]

    def wait_for(states: str, *pids: int) -> None:
        wait_until(lambda: all(state(pid) in states for pid in pids))

    with subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            for _ in range(2):
                parent.send_signal(signal.SIGTSTP)
                wait_for("T", pid, parent.pid)
                parent.send_signal(signal.SIGCONT)
                wait_for("RS", pid, parent.pid)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_signal_is_raised_after_the_child_has_ended_and_handlers_are_restored(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    saves = f"trap 'sleep 0.3; touch {tmp_path}/saved; exit' TERM; sleep 0.2; kill -TERM $PPID"
    with pytest.raises(Stopped) as stopped:
        run_to_end(["sh", "-c", f"{saves}; while :; do sleep 0.05; done"])
    assert stopped.value.number == signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
