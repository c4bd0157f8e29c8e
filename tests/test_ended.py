"""However a program ends, what it has started ends with it: by Ctrl-C, SIGTERM, SIGHUP, and where it is killed."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from model_dirs import write_model_dir
from waiting import wait_until

from fasttfm.data.demo import write_demo_corpus
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.system.children import command_line

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has died")

ROOT = Path(__file__).parents[1]
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
TRAIN = "--workers 2 --d-model 16 --heads 2 --d-ff 32 --encoder-layers 1 --decoder-layers 1 --max-update 1000000"


class Program(NamedTuple):
    """A command line; {text}, {data}, {model} and {out} stand for folders."""

    words: tuple[str, ...]
    processes: int
    """When it has so many, itself among them, and has said so much, the signal comes."""
    signals: tuple[int, ...] = (signal.SIGKILL,)
    says: str = ""
    needs: str = ""
    """A package."""


BENCHMARK = (sys.executable, "-m", "benchmarks", "end_to_end", "demo", "--text", "{text}", "--work", "{out}")
_OPEN_LOOP = """
import sys, time
from benchmarks import command, open_loop
open_loop.burst = lambda *_: time.sleep(600)
sys.exit(command.run(open_loop.main))
"""
_SERVING = "{model} --text {text}/train.en --workers 2 --results {out} --seconds 600"
_CTRANSLATE2 = """
import time, torch
from benchmarks.peers.ctranslate2 import Translate
from fasttfm.models import Transformer, TransformerConfig
if __name__ == "__main__":
    config = TransformerConfig(vocab_size=60, d_model=16, heads=2, d_ff=32, encoder_layers=1, decoder_layers=1)
    options = {"length": 4, "compute_type": "float32", "device": torch.device("cpu"), "threads": 1}
    kept = Translate(config, Transformer(config).state_dict(), beam=1, **options)
    print("ready", flush=True)
    time.sleep(600)
"""
_MATRIX = """
import os, time
from fasttfm.kernels.proof.matrix import _pool
if __name__ == "__main__":
    with _pool(2) as pool:
        [each.result() for each in [pool.submit(os.getpid) for _ in range(2)]]
        print("ready", flush=True)
        time.sleep(600)
"""

PROGRAMS = {
    "end_to_end": Program((*BENCHMARK, "--", *TRAIN.split()), 4, ALL),
    "end_to_end, the peer": Program((*BENCHMARK, "--peer", "torch.nn", "--minutes", "10"), 2),
    "train": Program(tuple(command_line("train", *f"--data {{data}} --out {{out}}/M {TRAIN}".split())), 3),
    "open_loop": Program(  # multiprocessing has one more
        (sys.executable, "-c", _OPEN_LOOP, *_SERVING.split()), 4, (signal.SIGTERM, signal.SIGKILL)
    ),
    "ranks": Program(
        (sys.executable, "-m", "benchmarks.ranks", "--ranks", "2", "--results", "{out}"),
        3,
        (signal.SIGTERM, signal.SIGKILL),
    ),
    "CTranslate2": Program((sys.executable, "-c", _CTRANSLATE2), 3, says="ready", needs="ctranslate2"),
    "compile matrix": Program((sys.executable, "-c", _MATRIX), 4, (signal.SIGTERM, signal.SIGKILL), "ready"),
}


def marked(mark: str) -> list[int]:
    """The processes that live and have a mark in their environment, which all take over from whoever started them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # another user's, or it has ended
            continue
    return found


def end_by(number: int, words: list[str], program: Program, said: Path) -> None:
    """Run a program, which gets a signal, it alone, as soon as it is ready; return when no process is left of it.

    said: the file for what it says.
    """
    name, value = "FASTTFM_TEST_MARK", str(uuid.uuid4())
    environment, mark = {**os.environ, "OMP_NUM_THREADS": "1", name: value}, f"{name}={value}"
    with said.open("w") as out:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )

    def is_ready() -> bool:
        return len(marked(mark)) >= program.processes and program.says in said.read_text()

    try:
        wait_until(lambda: process.poll() is not None or is_ready())
        process.send_signal(number)
        assert process.wait() in (-number, 128 + number), said.read_text()
        wait_until(lambda: not marked(mark))
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo corpus, and prepared data and an untrained model."""
    folder = tmp_path_factory.mktemp("ended")
    text = folder / "text"
    write_demo_corpus(text)
    files = [[text / f"{name}.{side}"] for name in ("valid", "test") for side in ("en", "de")]
    prepare(*files, folder / "data", PrepareOptions(vocab_size=200, byte_fallback=False), say=lambda line: None)
    return {"text": text, "data": folder / "data", "model": write_model_dir(folder / "model", trained=False)}


@on_linux
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, program in PROGRAMS.items() for number in program.signals]
)
def test_nothing_outlives_a_program(folders, tmp_path, name, number):
    program = PROGRAMS[name]
    if program.needs and importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    (tmp_path / "data").symlink_to(folders["data"])  # an end_to_end that has been prepared
    places = {**folders, "out": tmp_path}
    words = [re.sub(r"\{(text|data|model|out)\}", lambda found: str(places[found[1]]), word) for word in program.words]
    end_by(number, words, program, tmp_path / "said")


WAYS = r"subprocess\.(run|Popen|call|check_\w+)\(|ProcessPoolExecutor\(|\.Process\(|get_context\(|os\.(exec|spawn)"
"""Ways to start a process."""
STARTED = {
    "benchmarks/measure/machine.py": 2,  # git, nvidia-smi
    "benchmarks/open_loop.py": 2,
    "benchmarks/peers/ctranslate2.py": 1,
    "benchmarks/queue/prepare.py": 1,  # strip; what compiles is ended by timeout, and with this process
    "benchmarks/ranks.py": 2,
    "fasttfm/system/children.py": 1,
    "fasttfm/system/processes.py": 1,
    "kernels/proof/assembler.py": 1,  # ptxas
    "kernels/proof/matrix.py": 3,  # one of them git
    "ptx-check/src/ptx_check/ledger/counted.py": 1,  # ptxas
    "ptx-check/src/ptx_check/ledger/peers.py": 1,  # c++filt
    "ptx-check/src/ptx_check/ledger/sass.py": 1,  # cuobjdump, nvdisasm
    "ptx-check/src/ptx_check/machine_code/compared.py": 1,  # ptxas
    "ptx-check/src/ptx_check/machine_code/cubin.py": 1,  # nvdisasm
}
"""File -> lines that start processes. Those without a word to them have a program above, or tests of their own; the
others start programs that end in seconds by themselves."""


def test_every_place_that_starts_a_process_is_known():
    found = {}
    for folder in ("benchmarks", "fasttfm", "kernels", "pretraining", "ptx-check/src"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if re.search(WAYS, line)]
            if lines and "tests" not in path.parts[:-1]:
                found[path.relative_to(ROOT).as_posix()] = len(lines)
    assert found == STARTED
