"""Prepares a device's minutes without a device: kernels compiled, data prepared, packages packed.

    python -m benchmarks queue --prepare FOLDER --text multi30k=DIR --python 3.12 --package triton==3.7.1

FOLDER then holds kernels/ (Triton's cache), multi30k/ (text, and data prepared by `fasttfm prepare`), site/ (packages
for a Python there that lacks them, less what nothing here runs) and prepared.tar.xz of all that. On the device:

    tar xf prepared.tar.xz -C /tmp/prepared
    PYTHONPATH=/tmp/prepared/site python -m benchmarks queue --prepared /tmp/prepared --seconds 700

Kernels are compiled by the command of each question under stand_in.py. Triton's cache knows them by Triton's version
alone then, so the same version must run there: give it as a --package where that Python has another.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.end_to_end import CORPORA
from benchmarks.end_to_end import prepare as prepare_corpus
from benchmarks.measure.machine import ROOT
from benchmarks.queue.questions import Question
from fasttfm.errors import UserError
from fasttfm.system.children import ask_for_parents_end, run_to_end
from fasttfm.system.files import read_json
from ptx_check.chips import CHIPS

ARCHIVE = "prepared.tar.xz"
LARGEST = 60 << 20
"""Bytes of the archive: what can be carried beside a checkout."""
_LIMIT = 1_800.0
"""Seconds that a question's kernels may take to compile."""
_DROPPED = (
    "backends/amd/", "cupti/", "libproton.so", "ptxas-blackwell", "FileCheck", "nvdisasm", "plugins/",
    "instrumentation/",
)  # fmt: skip
"""Of Triton: what no NVIDIA device before Blackwell runs."""
_KEY = """

def triton_key():  # kernels were compiled by this version with another Python's build
    return "triton-{version}"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prepare")
    group.add_argument("--prepare", type=Path, metavar="FOLDER", help="compile and pack into it what the queue needs")
    group.add_argument("--chip", default="sm_90", choices=CHIPS, metavar="NAME", help="(default: %(default)s)")
    group.add_argument("--text", action="append", default=[], metavar="CORPUS=DIR", help="text to prepare and carry")
    group.add_argument("--package", action="append", default=[], metavar="NAME==VERSION", help="wheel to carry")
    group.add_argument("--python", metavar="VERSION", help="of the device, for --package (default: this one's)")


def compiled(prepared: Path | None) -> set[str] | None:
    """The kernels of ours in Triton's cache, as name-key; None without a prepared folder."""
    if prepared is None:
        return None
    files = (prepared / "kernels").glob("*/*.cubin")
    ours = (file for file in files if not file.stem.startswith("triton_"))  # which are inductor's
    return {f"{file.stem}-{file.parent.name[:8]}" for file in ours}


def relocate(prepared: Path) -> None:
    """Points Triton's cache to where it lies now: it writes down its files' absolute paths."""
    if not (prepared / "kernels").is_dir():
        raise UserError(f"--prepared {prepared} holds no kernels/: give a folder that --prepare made, unpacked")
    for file in (prepared / "kernels").glob("*/__grp__*.json"):
        whole = read_json(file)
        group = whole.get("child_paths") if isinstance(whole, dict) else None
        if not isinstance(group, dict):
            raise UserError(f"--prepared {prepared}: {file.name} is damaged: unpack the archive again")
        here = {name: str(file.parent / name) for name in group}
        if here != group:
            file.write_text(json.dumps({"child_paths": here}))


def main(args: argparse.Namespace, questions: Sequence[Question]) -> int:
    """Prepares a folder for the questions; 1 where a command that compiles did not end."""
    folder: Path = args.prepare.resolve()
    if " " in str(folder):
        raise UserError(f"--prepare {folder}: give a folder without spaces, since Triton writes paths down")
    texts = dict(_pair(each) for each in args.text)
    for each in args.package:
        if each.count("==") != 1:
            raise UserError(f"--package {each} must be NAME==VERSION")
    try:
        (folder / "kernels").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--prepare {folder} cannot be written to ({error.strerror}): name another folder") from error
    for corpus, text in texts.items():
        _carry_text(corpus, text, folder / corpus)
    broken = [question.name for question in questions if not _compile(question, args.chip, folder)]
    for name in broken:
        print(f"benchmarks: {name}: its kernels were not compiled to the end", file=sys.stderr)
    _drop_intermediate(folder / "kernels")
    if args.package:
        _carry_packages(args.package, args.python, folder / "site")
    size = _pack(folder)
    print(f"{len(compiled(folder) or ())} kernels for {args.chip}; {folder / ARCHIVE}: {size / 2**20:.1f} MiB")
    if size > LARGEST:
        raise UserError(
            f"{ARCHIVE} has {size / 2**20:.1f} MiB, more than {LARGEST >> 20}: carry fewer packages or texts"
        )
    return 1 if broken else 0


def _pair(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals or name not in CORPORA or not Path(folder).is_dir():
        raise UserError(f"--text {text} must be CORPUS=DIR, one of {', '.join(CORPORA)} and an existing folder")
    return name, Path(folder)


def _carry_text(corpus: str, text: Path, to: Path) -> None:
    """The text of a corpus, and its data as `benchmarks end_to_end` prepares it."""
    shutil.copytree(text, to / "text", dirs_exist_ok=True, copy_function=shutil.copyfile)
    prepare_corpus(corpus, to / "text", to / "work")


def _compile(question: Question, chip: str, folder: Path) -> bool:
    """Compiles what a question launches; whether its command came to an end."""
    wanted = question.command if question.compiles is None else question.compiles
    if not wanted:
        return True
    began, before = time.monotonic(), compiled(folder) or set()
    wanted = wanted.replace("{prepared}", str(folder)).replace("{results}", str(folder / "discarded"))
    line = [sys.executable, "-m", "benchmarks.queue.stand_in", chip, *wanted.split()]
    variables = {"TRITON_CACHE_DIR": str(folder / "kernels"), "FASTTFM_CACHE": str(folder / "discarded")}
    environment = {**os.environ, **variables}
    environment.pop("TRITON_INTERPRET", None)
    log = folder / f"{question.name}.log"
    try:
        with log.open("wb") as sink:
            done = run_to_end(
                ["timeout", f"{_LIMIT:.0f}", *line], env=environment, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT,
                preexec_fn=ask_for_parents_end,
            )  # fmt: skip
    finally:
        shutil.rmtree(folder / "discarded", ignore_errors=True)
    new = len((compiled(folder) or set()) - before)
    print(f"{question.name}: {new} kernels more, {time.monotonic() - began:.0f} s", flush=True)
    tests = "pytest" in wanted.split()  # whose failures say that nothing was computed
    return done.returncode == 0 or (tests and done.returncode == 1)


def _drop_intermediate(kernels: Path) -> None:
    """Leaves of each kernel what a launch reads: the machine code and its description."""
    for file in kernels.glob("*/*"):
        if file.suffix not in (".cubin", ".json"):
            file.unlink()


def _carry_packages(packages: Sequence[str], python: str | None, site: Path) -> None:
    """Unpacks wheels for a Python, Triton's without what is not run, and with the key that its cache was filled by."""
    wheels = site.with_name("wheels")
    for_python = [] if python is None else ["--python-version", python, "--implementation", "cp"]
    platforms = [f"--platform=manylinux{each}_x86_64" for each in ("_2_28", "_2_27", "_2_17", "2014")]
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={wheels}"]
    done = run_to_end([*line, *for_python, *(platforms if python else []), *packages])
    if done.returncode:
        raise UserError(f"pip could not download {' '.join(packages)} for Python {python or 'as here'}: see above")
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if not (n.startswith("triton") and any(d in n for d in _DROPPED))]
            archive.extractall(site, names)
            for name in names:  # zipfile forgets what may be executed
                mode = archive.getinfo(name).external_attr >> 16
                if mode & 0o111 and not name.endswith("/"):
                    os.chmod(site / name, 0o755)
    for library in site.rglob("*.so"):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
    triton = site / "triton" / "runtime" / "cache.py"
    if triton.is_file():
        (version,) = (each.partition("==")[2] for each in packages if each.startswith("triton=="))
        if version != metadata.version("triton"):
            raise UserError(f"--package triton=={version}: kernels are compiled by {metadata.version('triton')} here")
        triton.write_text(triton.read_text() + _KEY.format(version=version))
        amd = site / "triton" / "backends" / "amd"
        shutil.rmtree(amd, ignore_errors=True)
        for entry in site.glob("triton-*.dist-info/entry_points.txt"):
            lines = entry.read_text().splitlines(keepends=True)
            entry.write_text("".join(line for line in lines if not line.startswith("amd")))


def _pack(folder: Path) -> int:
    """Writes the archive; its size in bytes."""
    archive = folder / ARCHIVE
    archive.unlink(missing_ok=True)
    partial = archive.with_suffix(".part")
    with tarfile.open(partial, "w:xz", preset=6) as tar:
        for each in sorted(folder.iterdir()):
            if each.is_dir() and each.name != "wheels":
                tar.add(each, each.name)
    partial.replace(archive)
    return archive.stat().st_size
