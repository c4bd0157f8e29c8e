"""Child processes: no imports from the working folder, forwarded signals, end with the parent."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from waiting import PATIENCE, is_alive, wait_for_end, wait_until

from fasttfm.errors import Stopped
from fasttfm.store.steps import saved_steps
from fasttfm.system.children import calling, command_line, run_to_end
from fasttfm.system.folders import replacing

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


def lines(draw: random.Random, count: int) -> str:
    """Random sentences, enough for a vocabulary of 2,000 pieces."""
    word = lambda: "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(draw.randint(1, 4)))  # noqa: E731
    return "".join(" ".join(word() for _ in range(draw.randint(2, 8))) + "\n" for _ in range(count))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder full of traps in which a recipe has run all its commands with the default workers."""
    folder = tmp_path_factory.mktemp("recipe")
    draw = random.Random(1)
    with replacing(folder / "data" / "multi30k", "a test", "text of a dataset") as fresh:
        for stem, count in (("train.1", 400), ("valid", 8), ("test.flickr2016", 4)):
            for language in ("en", "de"):
                (fresh.path / f"{stem}.{language}").write_text(lines(draw, count))
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
    return folder


@pytest.mark.whole
def test_no_command_of_a_recipe_imports_from_the_working_folder(recipe):
    assert not (recipe / "told").exists(), (recipe / "told").read_text()


@pytest.mark.whole
def test_torchrun_as_documented_does_not_import_from_the_working_folder(recipe, tmp_path):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    documented = re.findall(r"^torchrun --nproc-per-node 8 (?!--max)[^\n]*", page, re.M)[0].split()
    (tmp_path / "bin").mkdir()
    for name, module, function in (
        ("torchrun", "torch.distributed.run", "main"),
        ("fasttfm", "fasttfm.cli.main", "main"),
    ):
        script = tmp_path / "bin" / name  # as written by pip
        call = f"import sys\nsys.path.append({str(ROOT)!r})\nfrom {module} import {function}\nsys.exit({function}())\n"
        # a shebang cannot have a path with a space: the line is a shell command and a Python string
        first = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
        script.write_text(f"{first}\n{call}")
        script.chmod(0o755)
    places = {"8": "2", "DATA": str(recipe / "runs" / "multi30k-dry" / "data"), "MODEL": str(tmp_path / "model")}
    done = subprocess.run(
        [*(places.get(word, word) for word in documented), *SMALL.split(), "--max-update", "1", "--no-valid-bleu"],
        cwd=recipe,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, (recipe / "told").exists()) == (0, False), done.stderr
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


def training_recipe(recipe: Path, folder: Path, workers: int, stdout=subprocess.PIPE) -> tuple[subprocess.Popen, str]:
    """A recipe that trains forever, and the first line of its log."""
    shutil.copytree(recipe / "runs" / "multi30k-dry" / "data", folder / "data")
    words = f"recipe multi30k --dry-run --work {folder} --train {SMALL} --max-update 1000000 --log-interval 1"
    words += f" --save-interval-updates 0 --valid-interval-updates 0 --workers {workers}"
    process = forked.TrainingPopen(
        command_line(*words.split()), cwd=recipe, env=forked.forked_children(), stdout=stdout, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    return process, next(line for line in process.stderr if "epoch" in line and "tokens/s" in line)


def search(root: str) -> int:
    sys.path.insert(0, root)
    from tests.search import test_workers as tests

    with tests.search_workers(tests.tiny_model(), 2) as workers:
        return len(list(workers.each(tests._who, [(0.0, 1)] * 4))) - 4


@pytest.mark.whole
@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGTERM, 1), (signal.SIGTERM, 2), (signal.SIGINT, 2), (signal.SIGHUP, 2)]
)
def test_a_stopped_recipe_waits_until_training_has_saved(recipe, tmp_path, number, workers):
    process, first = training_recipe(recipe, tmp_path, workers)
    for _ in range(1 if number == signal.SIGINT else 2):  # GNU timeout sends two
        process.send_signal(number)
    stdout, rest = process.communicate(timeout=PATIENCE)
    said = [line for line in (first, *rest.splitlines()) if "tokens/s" not in line]
    assert process.returncode == 128 + number, said
    assert len(saved_steps(tmp_path / "model")) == 1
    assert said[-2].startswith("fasttfm train: stopped after update"), said
    how = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    assert said[-1] == f"fasttfm recipe: {how}"
    assert "$ fasttfm translate" not in stdout


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_training_saves_and_ends_when_its_recipe_is_killed(recipe, tmp_path):
    process, _ = training_recipe(recipe, tmp_path, 1, stdout=subprocess.DEVNULL)
    (child,) = forked.children_of(process.pid)
    process.kill()
    rest = process.stderr.read()  # until the child closes it
    assert "fasttfm train: stopped after update" in rest
    assert len(saved_steps(tmp_path / "model")) == 1
    wait_for_end([child])


def test_the_status_of_a_child_is_returned():
    assert run_to_end([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -signal.SIGKILL
    assert run_to_end([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3


def test_a_command_is_terminated_by_until(tmp_path):
    run = f"import pathlib, time; pathlib.Path({str(tmp_path / 'done')!r}).touch(); time.sleep(1000)"
    ended = run_to_end([sys.executable, "-c", run], until=(tmp_path / "done").exists)
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


def test_input_and_output_of_a_child():
    done = run_to_end(["cat"], input="a\n", stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", None)


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
    program = f"""
import os, signal, time
def late(*_):
    time.sleep(0.5)
    open({str(tmp_path / "saved")!r}, "w")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, late)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    with pytest.raises(Stopped) as stopped:
        run_to_end([sys.executable, "-c", program])
    assert stopped.value.number == signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
