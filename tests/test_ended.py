"""However a program ends, what it has started ends with it: by Ctrl-C, SIGTERM, SIGHUP, and where it is killed."""

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from waiting import wait_until

from fasttfm.data.demo import write_demo_corpus
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.system.children import command_line

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has died")

ROOT = Path(__file__).parents[1]
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
TRAIN = "--workers 2 --d-model 16 --heads 2 --d-ff 32 --encoder-layers 1 --decoder-layers 1 --max-update 1000000"


class Program(NamedTuple):
    """A command line; {text}, {data} and {out} stand for folders."""

    words: tuple[str, ...]
    processes: int
    """When it has so many, itself among them, and has said so much, the signal comes."""
    signals: tuple[int, ...] = (signal.SIGKILL,)
    says: str = ""


BENCHMARK = (sys.executable, "-m", "benchmarks", "end_to_end", "demo", "--text", "{text}", "--work", "{out}")
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
    "ranks": Program(
        (sys.executable, "-m", "benchmarks.ranks", "--ranks", "2", "--results", "{out}"),
        3,
        (signal.SIGTERM, signal.SIGKILL),
    ),
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
    """The demo corpus, and prepared data."""
    folder = tmp_path_factory.mktemp("ended")
    text = folder / "text"
    write_demo_corpus(text)
    files = [[text / f"{name}.{side}"] for name in ("valid", "test") for side in ("en", "de")]
    prepare(*files, folder / "data", PrepareOptions(vocab_size=200, byte_fallback=False), say=lambda line: None)
    return {"text": text, "data": folder / "data"}


@on_linux
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, program in PROGRAMS.items() for number in program.signals]
)
def test_nothing_outlives_a_program(folders, tmp_path, name, number):
    program = PROGRAMS[name]
    (tmp_path / "data").symlink_to(folders["data"])  # an end_to_end that has been prepared
    places = {**folders, "out": tmp_path}
    words = [re.sub(r"\{(text|data|out)\}", lambda found: str(places[found[1]]), word) for word in program.words]
    end_by(number, words, program, tmp_path / "said")
