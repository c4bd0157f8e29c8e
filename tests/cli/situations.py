"""Faults around a command: broken files, permissions, wrong flags, closed pipes, signals, odd paths.

A world is a directory with text, prepared data, a trained model and user files that no command may touch. A situation
is one command in a copy of a world with up to two faults. Permissions and full disks are simulated in `open`, because
root may read everything; signals arrive at one of its calls.
"""

import builtins
import contextlib
import errno
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from waiting import PATIENCE

from fasttfm.cli.main import main

TINY_MODEL = (
    "--d-model 16 --heads 2 --d-ff 16 --encoder-layers 1 --decoder-layers 1 --max-tokens 256 --warmup-updates 2 "
    "--log-interval 1 --save-interval-updates 1 --no-tensorboard --max-len-b 2 --beam 2 --valid-interval-updates 2"
)
COMMANDS = {
    "prepare": "--src train.src --tgt train.tgt --valid-src valid.src --valid-tgt valid.tgt --no-byte-fallback "
    "--threads 1 --vocab-size 64 --out",
    "train": f"--data data --device cpu --max-update 4 {TINY_MODEL} --out",
    "average": "model --last 2",
    "translate": "model --device cpu --max-len-b 3",
    "score": "--ref valid.tgt",
    "plot": "model --device cpu --layers 1 --out picture.png --attention",
}
OUTPUTS = {
    "prepare": ("fresh", "a/b/c", "data", "data", "model", "model/checkpoints", ".", "train.src"),
    "train": ("fresh", "model", "model", "model", "data", "."),
}
"""Output paths: new directories, the command's own, and those of other commands."""
MOST_BYTES = 2 << 30
"""Limit of address space beyond what is in use when a command starts."""
OTHERS = ("notes.txt", "data/notes.txt", "model/notes.txt", "model/checkpoints/notes.txt")
"""User files in every directory that commands write to."""

_WORDS = ["one", "two", "three", "four", "five", "six", "red", "green", "blue", "big", "small", "tree", "dog", "bird"]
_ODD_VALUES = ["", "nan", "1_0", "010", "-1", "x", "1e400", "inf", "0x1", "ü", "\udcff", "9" * 20]
_ODD_VALUES += ["-0.5", "None", "1:30"]
_ODD_PATHS = ["", ".", "..", "absent", "absent/absent", "n" * 300, "notes.txt", "notes.txt/x", "a\nb"]
_ODD_PATHS += ["run$_{$b'", "\udcff"]
_ODD_PATHS += ["/dev/null", "/dev/full", "model", "data", "train.src", "model/checkpoints", "ü x", "-", "-x", "%s", "~"]
_ODD_TEXTS = [b"", b"\n\n", b"one\r\ntwo\rthree", "one\u2028two\x85\x0c\n".encode(), b"one\0two\n"]
_ODD_TEXTS += [b"good\nM\xe4nner\n", "one two\n".encode("utf-16"), "one two\n".encode("utf-16-be")]
_ODD_TEXTS += [b"\x1f\x8b\x08\0cut", b"\xfd7zXZ\0", b"dog " * 3000 + b"\n", "▁ <s> </s> <unk>\n".encode()]
_SLOW_FLAGS = {"--threads", "--max-update", "--max-epoch", "--max-minutes", "--help"}


@dataclass
class Situation:
    """A command and its faults."""

    draw: random.Random
    command: str
    arguments: list[str]
    text: bytes = b""
    faults: list[str] = field(default_factory=list)
    seams: list[contextlib.AbstractContextManager] = field(default_factory=list)
    streams: str = "whole"
    """Fault of the standard streams: "closed pipe" or "full disk" (standard output), "no stdin" and so on."""

    def __str__(self) -> str:
        return f"fasttfm {self.command} {self.arguments!r} with {' and '.join(self.faults)}"


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    status: int | None
    """None if it raised an exception."""
    errors: str
    """Standard error, including that of libraries."""


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    """contextlib.chdir of Python 3.11."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def make_world(folder: Path) -> None:
    """Text, prepared data, a model of three updates, and the user's own files."""
    draw = random.Random(1)
    for name, pairs in (("train", 60), ("valid", 6)):
        sources = [draw.choices(_WORDS, k=draw.randint(2, 6)) for _ in range(pairs)]
        for side, lines in (("src", sources), ("tgt", [words[::-1] for words in sources])):
            (folder / f"{name}.{side}").write_text("".join(" ".join(words) + "\n" for words in lines))
    with working_folder(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["prepare", *COMMANDS["prepare"].split(), "data"]) == 0
        words = COMMANDS["train"].replace("--max-update 4", "--max-update 3").split()
        assert main(["train", *words, "model"]) == 0
    for name in OTHERS:
        (folder / name).write_text(f"the user's own {name}\n")


def usual_command(draw: random.Random) -> Situation:
    """A typical command in the world that is the working directory."""
    command = draw.choice(list(COMMANDS))
    arguments = COMMANDS[command].split()
    if command in OUTPUTS:
        arguments.append(draw.choice(OUTPUTS[command]))
    if command == "prepare":
        arguments[arguments.index("64")] = draw.choice(["64", "60"])
    if command == "translate" and draw.random() < 0.3:
        arguments = [*arguments[:3], "--score", "valid.tgt"]
    if command == "plot":
        arguments.append(draw.choice(["one two", "", "\u00a0", "ü 日 $x$", "a\0b", "dog " * 100, "\udcff"]))
    return Situation(draw, command, arguments, Path("valid.src").read_bytes())


# Faults


def break_file(situation: Situation) -> str:
    """Damage, delete or replace an input file."""
    path = situation.draw.choice(_files())
    content = path.read_bytes()
    how = situation.draw.choice(["cut", "empty", "flipped", "longer", "gone", "folder", "dangling", "noise", "latin1"])
    path.unlink()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        position = situation.draw.randrange(max(1, len(content)))
        path.write_bytes(content[:position] + bytes([content[position] ^ 64]) + content[position + 1 :])
    elif how == "longer":
        path.write_bytes(content + b"\0\xff\n")
    elif how == "folder":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to("/absent/disk")
    elif how == "noise":
        path.write_bytes(situation.draw.randbytes(200))
    elif how == "latin1":
        path.write_bytes(content[: len(content) // 2] + "\nMänner\n".encode("latin1") + content[len(content) // 2 :])
    return f"{path} {how}"


def break_checkpoints(situation: Situation) -> str:
    """Delete checkpoints, or link them to a missing disk."""
    folder = Path("model/checkpoints")
    steps = sorted(path for path in folder.glob("step-*") if path.is_dir())
    if not steps:
        return "no checkpoint left to break"
    how = situation.draw.choice(["dangling", "newest gone", "newest two gone", "all gone", "newest has no meta.json"])
    if how == "dangling":
        folder.rename("elsewhere")
        folder.symlink_to("/absent/disk")
    elif how == "newest has no meta.json":
        (steps[-1] / "meta.json").unlink(missing_ok=True)
    else:
        for step in steps[{"newest gone": -1, "newest two gone": -2, "all gone": 0}[how] :]:
            shutil.rmtree(step)
    return f"checkpoints: {how}"


def change_setting(situation: Situation) -> str:
    """Put an odd value into the model's config.yaml or a file for --config."""
    draw = situation.draw
    if situation.command == "train" and draw.random() < 0.5:
        name, section = draw.choice(["vocab_size", "source_vocab_size", "pad_id", "heads", "lr"]), "model"
        section = "training" if name == "lr" else section
        Path("my.yaml").write_text(
            f"{section}:\n  {name}: {draw.choice(['3', '599', '010', '1:30', 'null', '-1', '.inf'])}\n"
        )
        situation.arguments += ["--config", "my.yaml"]
        return f"{name} in my.yaml"
    path = Path("model/config.yaml")
    if not path.is_file():
        return "no config.yaml left to change"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    position = draw.randrange(len(lines)) if lines else 0
    if lines:
        lines[position] = (
            lines[position].split(":")[0] + f": {draw.choice([*_ODD_VALUES[1:9], '3', '[', '!x y', '{}'])}"
        )
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"config.yaml with {lines[position] if lines else 'nothing'!r}"


def break_text(situation: Situation) -> str:
    """Replace standard input or a text file by odd content."""
    text = situation.text = situation.draw.choice([*_ODD_TEXTS, situation.draw.randbytes(300)])
    target = situation.draw.choice(["standard input", "train.src", "valid.src", "valid.tgt"])
    if target != "standard input":
        Path(target).write_bytes(text)
    return f"{target} {text[:20]!r}"


def change_flag(situation: Situation) -> str:
    """Make a flag wrong, unknown, duplicate, or give it no value or an odd one."""
    arguments, draw = situation.arguments, situation.draw
    how = draw.choice(["value", "value", "value", "unknown", "removed", "doubled", "word"])
    flags = [position for position, word in enumerate(arguments) if word.startswith("--") and word not in _SLOW_FLAGS]
    position = draw.choice(flags) if flags else None
    if how == "value" and situation.command in ("train", "translate"):
        name = draw.choice(_setting_flags(situation.command))
        arguments += [name, draw.choice(_ODD_VALUES)]
    elif how == "value" and position is not None and position + 1 < len(arguments):
        arguments[position + 1] = draw.choice(_ODD_VALUES)
    elif how == "removed" and position is not None:
        del arguments[position : position + draw.choice([1, 2])]
    elif how == "doubled" and position is not None:
        arguments += arguments[position : position + 2]
    elif how == "word":
        arguments.insert(draw.randrange(len(arguments) + 1), draw.choice(_ODD_VALUES))
    else:
        arguments.append(draw.choice(["--d-modle", "--unknown", "-x", "--beam=", "--max-tok=3", "--pad-id=3"]))
    return f"flag {how}"


def change_path(situation: Situation) -> str:
    """Replace a path among the arguments by an odd one."""
    positions = [
        position
        for position, word in enumerate(situation.arguments)
        if not word.startswith("-") and ("." in word or word in ("model", "data", "fresh", "a/b/c"))
    ]
    if not positions:
        return "no path left to change"
    position = situation.draw.choice(positions)
    old, situation.arguments[position] = situation.arguments[position], situation.draw.choice(_ODD_PATHS)
    return f"a path in place of {old}"


def deny(situation: Situation) -> str:
    """Deny access to a file or directory."""
    path = situation.draw.choice([*_files(), *(Path(name) for name in ("data", "model", "model/checkpoints"))])
    number = situation.draw.choice([errno.EACCES, errno.EACCES, errno.EIO, errno.EROFS])
    situation.seams.append(_on_open(lambda opened, mode, count: _fail(number, opened) if opened == path else None))
    return f"{path} {errno.errorcode[number]}"


def fill_disk(situation: Situation) -> str:
    """Fail writes with ENOSPC from some opened file on."""
    first = situation.draw.randint(1, 8)

    def check(opened: Path, mode: str, count: int) -> None:
        if mode == "w" and count >= first:
            _fail(errno.ENOSPC, opened)

    situation.seams.append(_on_open(check, writes_only=True))
    return f"a full disk at write {first}"


def send_signal(situation: Situation) -> str:
    """Send Ctrl-C, SIGTERM or SIGHUP when some file is opened."""
    call = situation.draw.randint(1, 60)
    number = situation.draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])

    def check(opened: Path, mode: str, count: int) -> None:
        if count == call:
            os.kill(os.getpid(), number)

    situation.seams.append(_on_open(check))
    return f"{number.name} at file {call}"


def close_stream(situation: Situation) -> str:
    """Close the pipe of standard output, fill its disk, or start without one of the streams."""
    situation.streams = situation.draw.choice(["closed pipe", "full disk", "no stdin", "no stdout", "no stderr"])
    return situation.streams


def allow_few_files(situation: Situation) -> str:
    """Limit the number of files that the process may open."""
    more = situation.draw.randint(0, 40)
    descriptors = max(map(int, os.listdir("/proc/self/fd"))) + 1 + more
    situation.seams.append(_limited(resource.RLIMIT_NOFILE, descriptors))
    return f"{more} descriptors"


@contextlib.contextmanager
def _limited(resource_: int, most: int) -> Iterator[None]:
    """Limit a resource of this process."""
    before = resource.getrlimit(resource_)
    resource.setrlimit(resource_, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource_, before)


def move_folder(situation: Situation) -> str:
    """Move a directory away when some file is opened; its content is restored at the end."""
    name, call = situation.draw.choice(["data", "model", "model/checkpoints", "fresh"]), situation.draw.randint(1, 60)
    situation.seams.append(_moved(Path.cwd() / name, call))
    return f"{name} moved away at file {call}"


@contextlib.contextmanager
def _moved(folder: Path, call: int) -> Iterator[None]:
    aside = Path.cwd().parents[1] / "moved"

    def check(opened: Path, mode: str, count: int) -> None:
        if count == call and folder.exists():
            folder.rename(aside)

    try:
        with _on_open(check):
            yield
    finally:
        if aside.exists():
            shutil.copytree(aside, folder, symlinks=True, dirs_exist_ok=True)


def _files() -> list[Path]:
    """Return the input files of the world in a fixed order."""
    files = [path for path in sorted(Path().rglob("*")) if path.is_file() and path.name != "notes.txt"]
    return [path for path in files if path.suffix not in (".png", ".svg")]


def _setting_flags(command: str) -> list[str]:
    from fasttfm.config import SECTIONS, field_types

    sections = SECTIONS if command == "train" else ["decoding"]
    flags = [f"--{name.replace('_', '-')}" for section in sections for name in field_types(SECTIONS[section])]
    return [flag for flag in flags if flag not in _SLOW_FLAGS]


def _fail(number: int, path: Path) -> None:
    raise OSError(number, os.strerror(number), str(path))


@contextlib.contextmanager
def _on_open(check: Callable[[Path, str, int], None], writes_only: bool = False) -> Iterator[None]:
    """Call check(path relative to the world, "r" or "w", call number) before a file of the world is opened."""
    world, originals, count = Path.cwd(), {}, 0

    def checked(name: str, original: Callable) -> Callable:
        def wrapper(path: object = ".", *arguments: object, **options: object) -> object:
            nonlocal count
            if isinstance(path, (str, bytes, os.PathLike)):
                whole = Path(os.fsdecode(path)) if Path(os.fsdecode(path)).is_absolute() else world / os.fsdecode(path)
                if whole.is_relative_to(world):
                    asked = options.get("mode", options.get("flags", arguments[0] if arguments else "r"))
                    writes = bool(asked & 3) if isinstance(asked, int) else bool(set(str(asked)) & set("wax+"))
                    if writes or not writes_only:
                        count += 1
                        check(whole.relative_to(world), "w" if writes else "r", count)
            return original(path, *arguments, **options)

        return wrapper

    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "scandir")):
        originals[module, name] = getattr(module, name)
        setattr(module, name, checked(name, originals[module, name]))
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


# Running


def run_here(situation: Situation, folder: Path) -> Outcome:
    """Run in this process with redirected streams; an exception from main is written as a traceback."""
    import traceback

    errors = folder / "errors"
    status: int | None = None
    with errors.open("wb") as file, _streams(situation, file.fileno()), contextlib.ExitStack() as stack:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        stack.enter_context(_limited(resource.RLIMIT_AS, pages * resource.getpagesize() + MOST_BYTES))
        try:
            for seam in situation.seams:
                stack.enter_context(seam)
            status = main([situation.command, *situation.arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:
            sys.stderr.write(traceback.format_exc())
        except KeyboardInterrupt:
            sys.stderr.write("Traceback: an interrupt left main\n")
    return Outcome(status, errors.read_text(encoding="utf-8", errors="replace"))


def run_with_little_memory(situation: Situation, kilobytes: int) -> Outcome:
    """Run in a new process with this limit of its address space."""
    limited = f'ulimit -v {kilobytes}; exec "$0" "$@"'
    words = ["bash", "-c", limited, sys.executable, "-I", "-m", "fasttfm", situation.command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, *(word.replace("\0", "") for word in situation.arguments)],  # no process can be given such a byte
        input=situation.text,
        capture_output=True,
        env=environment,
        timeout=PATIENCE,
        check=False,
    )
    return Outcome(done.returncode, done.stderr.decode(errors="replace"))


@contextlib.contextmanager
def _streams(situation: Situation, errors: int) -> Iterator[None]:
    """Redirect the standard streams; descriptor 2, which C++ writes to, goes to `errors` too."""
    reader, writer = os.pipe()
    os.close(reader)
    if situation.streams != "closed pipe":
        os.close(writer)
        writer = os.open("/dev/full" if situation.streams == "full disk" else os.devnull, os.O_WRONLY)
    before, descriptor = (sys.stdin, sys.stdout, sys.stderr), os.dup(2)
    os.dup2(errors, 2)
    sys.stdin = io.TextIOWrapper(io.BytesIO(situation.text), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(os.fdopen(writer, "wb"), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(errors), "wb"), encoding="utf-8", errors="backslashreplace")
    opened = sys.stdout, sys.stderr
    if situation.streams.startswith("no "):
        setattr(sys, situation.streams.removeprefix("no "), None)
    try:
        yield
    finally:
        for stream in opened:
            with contextlib.suppress(OSError):
                stream.close()
        sys.stdin, sys.stdout, sys.stderr = before
        os.dup2(descriptor, 2)
        os.close(descriptor)
