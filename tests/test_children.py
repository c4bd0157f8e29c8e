"""Child processes: no imports from the working folder, forwarded signals, end with the parent."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE, wait_for_end

from fasttfm.errors import Stopped
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
def test_no_command_of_a_recipe_imports_from_the_working_folder(tmp_path):
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
    assert not (folder / "told").exists(), (folder / "told").read_text()


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_remaining_processes_of_a_stopped_child_are_killed(tmp_path):
    """A shell that is terminated does not forward the signal."""
    told = tmp_path / "told"
    with pytest.raises(Stopped):
        run_to_end(["sh", "-c", f"sleep 600 & echo $! > {told}; kill -TERM $PPID; wait"])
    wait_for_end([int(told.read_text())])


def test_a_signal_is_raised_after_the_child_has_ended_and_handlers_are_restored(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    saves = f"trap 'sleep 0.3; touch {tmp_path}/saved; exit' TERM; sleep 0.2; kill -TERM $PPID"
    with pytest.raises(Stopped) as stopped:
        run_to_end(["sh", "-c", f"{saves}; while :; do sleep 0.05; done"])
    assert stopped.value.number == signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
