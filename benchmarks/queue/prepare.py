"""Prepares a session on a device beforehand: compiles kernels, prepares data, packs packages.

    python -m benchmarks queue --prepare FOLDER --text multi30k=DIR --python 3.12 --package triton==3.7.1

FOLDER then has kernels/ (Triton's cache), multi30k/ (text, and data by `fasttfm prepare`), site/ (packages that the
device's Python lacks, without unused parts) and prepared.tar.xz with all of them. On the device:

    tar xf prepared.tar.xz -C /tmp/prepared
    PYTHONPATH=/tmp/prepared/site python -m benchmarks queue --prepared /tmp/prepared --seconds 700

Kernels are compiled by running each question's command under stand_in.py, one per CPU core at a time. Their keys in
Triton's cache depend on Triton's version only, so the device must run the same version: pass it as --package if its
Python has another.
"""

import argparse
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from benchmarks import command
from benchmarks.end_to_end import CORPORA
from benchmarks.end_to_end import prepare as prepare_corpus
from benchmarks.queue.questions import Question
from fasttfm.errors import UserError
from fasttfm.system.children import run_to_end
from fasttfm.system.files import read_json
from fasttfm.system.machine import allowed_cores
from ptx_check.chips import CHIPS

ARCHIVE = "prepared.tar.xz"
LARGEST = 60 << 20
"""Largest size of the archive in bytes."""
_LIMIT = 7_200.0
"""Time limit for compiling the kernels of a question, in seconds."""
CASES = {"FASTTFM_TESTS": "all"}
"""Environment of questions that run tests: every case, where `make test` runs a part."""
_INTERVAL = 0.2
"""Seconds between two checks of the running commands."""
_DROPPED = (
    "backends/amd/", "cupti/", "libproton.so", "ptxas-blackwell", "FileCheck", "nvdisasm", "plugins/",
    "instrumentation/",
)  # fmt: skip
"""Parts of Triton that NVIDIA devices before Blackwell do not need."""
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
"""Compression of the archive, of which most is Triton's library, 176 MB of code for x86."""
_KEY = """

def triton_key():  # kernels were compiled by this version with another Python's build
    return "triton-{version}"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prepare")
    group.add_argument("--chip", default="sm_90", choices=CHIPS, metavar="NAME", help="(default: %(default)s)")
    group.add_argument("--text", action="append", default=[], metavar="CORPUS=DIR", help="text to prepare and pack")
    group.add_argument("--package", action="append", default=[], metavar="NAME==VERSION", help="wheel to pack")
    group.add_argument("--python", metavar="VERSION", help="Python of the device, for --package (default: this one)")


def compiled(prepared: Path | None) -> set[str] | None:
    """Our kernels in Triton's cache, as name-key; None without a prepared folder."""
    if prepared is None:
        return None
    files = (prepared / "kernels").glob("*/*.cubin")
    ours = (file for file in files if not file.stem.startswith("triton_"))  # those are Inductor's
    return {f"{file.stem}-{file.parent.name[:8]}" for file in ours}


def relocate(prepared: Path) -> None:
    """Rewrite the absolute paths in Triton's cache for the folder's current location."""
    if not (prepared / "kernels").is_dir():
        raise UserError(f"--prepared {prepared} has no kernels/: unpack an archive of --prepare")
    for file in (prepared / "kernels").glob("*/__grp__*.json"):
        names = read_json(file).get("child_paths")
        if not isinstance(names, dict):
            raise UserError(f"--prepared {prepared}: {file.name} is damaged: unpack the archive again")
        file.write_text(json.dumps({"child_paths": {name: str(file.parent / name) for name in names}}))


def main(args: argparse.Namespace, questions: Sequence[Question]) -> int:
    """Prepare a folder for the questions; returns 1 if one did not compile to the end."""
    folder: Path = args.prepare.resolve()
    if " " in str(folder):
        raise UserError(f"--prepare {folder}: the path must have no spaces, because Triton stores it")
    texts = dict(map(_corpus, args.text))
    for package in args.package:
        if package.count("==") != 1:
            raise UserError(f"--package {package} must be NAME==VERSION")
    command.writable(folder / "kernels", "--prepare")
    for corpus, text in texts.items():
        shutil.copytree(text, folder / corpus / "text", dirs_exist_ok=True, copy_function=shutil.copyfile)
        prepare_corpus(corpus, folder / corpus / "text", folder / corpus / "work")
    broken = _compile(questions, args.chip, folder)
    for name in broken:
        print(f"benchmarks: {name}: compilation of its kernels was interrupted", file=sys.stderr)
    _drop_intermediate(folder / "kernels")
    if args.package:
        _carry_packages(args.package, args.python, folder / "site")
    size = _pack(folder)
    print(f"{len(compiled(folder) or ())} kernels for {args.chip}; {folder / ARCHIVE}: {size / 2**20:.1f} MiB")
    if size > LARGEST:
        raise UserError(f"{ARCHIVE} has {size / 2**20:.1f} MiB, over {LARGEST >> 20}: pack fewer packages or texts")
    return 1 if broken else 0


def _corpus(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals or name not in CORPORA or not Path(folder).is_dir():
        raise UserError(f"--text {text} must be CORPUS=DIR, one of {', '.join(CORPORA)} and an existing folder")
    return name, Path(folder)


def _compile(questions: Sequence[Question], chip: str, folder: Path) -> list[str]:
    """Compile the kernels of all questions; returns the names of those whose commands did not run to their end."""
    waiting, running, broken = list(questions), list[_Compilation](), list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < allowed_cores():
                running.append(_Compilation(waiting.pop(0), chip, folder))
            time.sleep(_INTERVAL)
            for ended in [each for each in running if each.process.poll() is not None]:
                running.remove(ended)
                broken += [] if ended.close() else [ended.question.name]
                print(f"{ended.question.name}: compiled, {time.monotonic() - ended.began:.0f} s", flush=True)
    finally:
        for interrupted in running:
            interrupted.process.terminate()
            interrupted.close()
            with suppress(ProcessLookupError):  # timeout, stopped while it starts the command, leaves it behind
                os.killpg(interrupted.process.pid, signal.SIGKILL)
    return broken


class _Compilation:
    """A question's command that compiles its kernels, in a process of its own."""

    def __init__(self, question: Question, chip: str, folder: Path) -> None:
        self.question, self.began = question, time.monotonic()
        self._discarded = folder / f"discarded-{question.name}"
        self._words = (question.compiles or question.command).replace("{prepared}", str(folder))
        self._words = self._words.replace("{results}", str(self._discarded))
        line = [sys.executable, "-m", "benchmarks.queue.stand_in", chip, *self._words.split()]
        variables = {"TRITON_CACHE_DIR": str(folder / "kernels"), "FASTTFM_CACHE": str(self._discarded)}
        environment = {**os.environ, **CASES, **variables}
        environment.pop("TRITON_INTERPRET", None)
        output = folder / f"{question.name}.log"
        self.process: subprocess.Popen = command.limited(line, _LIMIT, environment, output, subprocess.Popen)

    def close(self) -> bool:
        """Wait for the process and remove its files; returns whether it ran to its end."""
        status = self.process.wait()
        shutil.rmtree(self._discarded, ignore_errors=True)
        tests = "pytest" in self._words.split()  # these fail, because nothing is computed
        return status == 0 or (tests and status == 1)


def _drop_intermediate(kernels: Path) -> None:
    """Keep only what a launch reads: machine code and metadata."""
    for file in kernels.glob("*/*"):
        if file.suffix not in (".cubin", ".json"):
            file.unlink()


def _carry_packages(packages: Sequence[str], python: str | None, site: Path) -> None:
    """Unpack wheels for a Python; Triton's without unused parts, and with the key of the prepared cache."""
    wheels = site.with_name("wheels")
    for_python = [] if python is None else ["--python-version", python, "--implementation", "cp"]
    platforms = [f"--platform=manylinux{version}_x86_64" for version in ("_2_28", "_2_27", "_2_17", "2014")]
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={wheels}"]
    done = run_to_end([*line, *for_python, *(platforms if python else []), *packages])
    if done.returncode:
        raise UserError(f"pip could not download {' '.join(packages)} for Python {python or 'as here'}: see above")
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if not (n.startswith("triton") and any(d in n for d in _DROPPED))]
            archive.extractall(site, names)
            for name in names:  # zipfile drops execute permissions
                mode = archive.getinfo(name).external_attr >> 16
                if mode & 0o111 and not name.endswith("/"):
                    os.chmod(site / name, 0o755)
    for library in site.rglob("*.so"):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
    triton = site / "triton" / "runtime" / "cache.py"
    if triton.is_file():
        (version,) = (package.partition("==")[2] for package in packages if package.startswith("triton=="))
        if version != metadata.version("triton"):
            raise UserError(f"--package triton=={version}: kernels are compiled by {metadata.version('triton')} here")
        triton.write_text(triton.read_text() + _KEY.format(version=version))
        shutil.rmtree(site / "triton" / "backends" / "amd", ignore_errors=True)
        for entry in site.glob("triton-*.dist-info/entry_points.txt"):
            lines = entry.read_text().splitlines(keepends=True)
            entry.write_text("".join(line for line in lines if not line.startswith("amd")))


def _pack(folder: Path) -> int:
    """Write the archive; returns its size in bytes."""
    archive = folder / ARCHIVE
    archive.unlink(missing_ok=True)
    partial = archive.with_suffix(".part")
    with lzma.open(partial, "w", filters=_FILTERS) as compressed, tarfile.open(fileobj=compressed, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name != "wheels":
                tar.add(path, path.name)
    partial.replace(archive)
    return archive.stat().st_size
