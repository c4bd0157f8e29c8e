"""Windows and macOS, planted: what they lack is missing here for a test. Neither system itself was tried."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fasttfm.store import ownership
from fasttfm.system import files, locks, processes

ROOT = Path(__file__).parents[1]


@pytest.fixture
def windows(monkeypatch):
    """No fcntl and no fork; directories cannot be opened, and a file that is only read cannot be synced."""
    opened, real_open, real_fsync = {}, os.open, os.fsync

    def open_as_windows_does(path, flags, *rest, **options):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        descriptor = real_open(path, flags, *rest, **options)
        opened[descriptor] = flags
        return descriptor

    def fsync_as_windows_does(descriptor):
        if opened.get(descriptor, os.O_RDWR) & (os.O_WRONLY | os.O_RDWR) == 0:
            raise OSError(9, "Bad file descriptor")
        real_fsync(descriptor)

    monkeypatch.setattr(files.os, "open", open_as_windows_does)
    monkeypatch.setattr(files.os, "fsync", fsync_as_windows_does)
    for module in (files, locks, ownership):
        monkeypatch.setattr(module, "fcntl", None)
    monkeypatch.delattr(os, "fork")

    class Windows:
        """The module os as fasttfm.system.files sees it: pathlib keeps the name of the system it was imported on."""

        name = "nt"

        def __getattr__(self, name):
            return getattr(os, name)

    monkeypatch.setattr(files, "os", Windows())


def test_a_file_is_written_and_synced_where_directories_cannot_be_opened(windows, tmp_path):
    path = tmp_path / "scores"
    for text in (b"first", b"second"):
        with files.writing(path) as file:
            file.write(text)
    assert path.read_bytes() == b"second"
    files.write_file(path, b"third")
    files.sync(path)
    files.sync(tmp_path)


def test_training_and_search_run_where_nothing_can_lock_or_fork(windows, tmp_path):
    with locks.locked(tmp_path / "model"):
        pass
    assert not processes.can_fork(torch.nn.Linear(2, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("platform", "missing"),
    [("win32", ["fcntl", "resource", "pwd", "grp", "termios", "triton"]), ("darwin", ["triton"])],
)
def test_the_package_is_imported_on_a_platform_without_these_modules(platform, missing):
    code = (
        "import sys; import torch, sacrebleu, sentencepiece, requests, multiprocessing.pool\n"
        f"sys.modules.update(dict.fromkeys({missing!r})); sys.platform = {platform!r}\n"
        "import os\n"
        f"for name in ('fork', 'killpg', 'sched_getaffinity') if {platform == 'win32'} else ('sched_getaffinity',):\n"
        "    delattr(os, name) if hasattr(os, name) else None\n"
        "import fasttfm.nn, fasttfm.models, fasttfm.search, fasttfm.training.run, fasttfm.cli.main\n"
        "from fasttfm.models import Transformer\n"
        "Transformer.from_preset('demo', vocab_size=50).loss(*[torch.randint(4, 50, (2, 5))] * 3)[0].backward()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
