"""Ownership of a folder's files, and whether they are whole: a manifest lists what a command wrote.

    FOLDER/sha256sums     a file a line, as `sha256sum --check sha256sums` reads it
           .lock          locked while a command writes here
           .new/          what is being written; a kill leaves it behind, and the next run deletes it
           .ready/        complete: its files are moved into their places, by the next process if this one is killed

Nothing that the manifest does not list is ever replaced, and whoever reads begins with reading() or settled(). The
folder itself stays where it is, so that it may be a link, a mounted disk or the folder that a shell stands in.
"""

import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from fasttfm.errors import UserError
from fasttfm.system.files import read_content, refuse_dangling_link, sha256, sync, unreadable, write_file
from fasttfm.system.locks import LOCK_FILE, locked

MANIFEST = "sha256sums"
_HEADER = "# written by fasttfm ({}), which replaces no other files than these\n"
_HEADERS = re.compile(r"# written by fasttfm \(([^()\n]+)\), which replaces no other files than these\n")
_NEW, _READY = ".new", ".ready"
_SHOWN = 3
_UNREAD = ("README.md",)
"""Files that no command reads, and that users do change."""


@dataclass(slots=True)
class Replacement:
    """A fresh directory for the files that are to take the place of a folder's."""

    path: Path
    wanted: bool = True
    """Set it to False to leave the folder as it is."""


@contextmanager
def replacing(folder: Path, doing: str, content: str) -> Iterator[Replacement]:
    """Collect files that take the place of those in `folder` when the block ends well, and vanish when it does not.

    doing: what a second process is told that this one does. content: what the files are, such as `prepared pairs`;
    the manifest keeps it. Raises UserError for a folder that holds other content, files which its manifest does not
    list, or files that were changed since, while another process writes into it, and for an error of the operating
    system in the block, such as a full disk.
    """
    refuse_dangling_link(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: exists and is not a directory: choose another --out")
    _refuse_strangers(folder, content)
    existed = folder.exists()
    try:
        with locked(folder, doing):
            if not existed:
                sync(folder.parent)
            _move_ready(folder)
            fresh = folder / _NEW
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            try:
                replacement = Replacement(fresh)
                with _told(folder):
                    yield replacement
                    if replacement.wanted:
                        _write_manifest(fresh, content)
                if replacement.wanted:
                    _refuse_strangers(folder, content)  # again: minutes may have passed
                    fresh.rename(folder / _READY)  # from here on it is the new files that count
                    sync(folder)
                    _move_ready(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    finally:
        if not existed and folder.is_dir() and os.listdir(folder) == [LOCK_FILE]:
            with suppress(OSError):
                (folder / LOCK_FILE).unlink()
                folder.rmdir()


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # of what somebody reads, not of a file here
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(
            f"{error.filename or folder}: {error.strerror}: {folder} was not written and is as it was before"
        ) from error


PREPARE_AGAIN = "move it away and prepare the data again"
_MADE_ANEW = "copy it back, or make the folder anew"


@contextmanager
def reading(folder: Path, remedy: str = _MADE_ANEW) -> Iterator[None]:
    """Hold what is read in the block to one kind: a folder whose files were replaced meanwhile is refused at its end.

    Begins with settled(folder), and compares files with the manifest, where there is one, but for weights.
    Raises UserError as settled() and compare() do.
    """
    settled(folder)
    folder = _root(folder)
    before = _manifest(folder)
    if has_manifest(folder):
        compare(folder, remedy, weights=False)
    yield
    if is_unfinished(folder) or _manifest(folder) != before:
        raise UserError(_BUSY.format(folder))


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The path itself, or while the block runs the folder that a .zip of its files is unpacked into.

    Raises UserError for a file that is no such archive, or too large for the disk.
    """
    if not path.is_file():
        yield path
        return
    with TemporaryDirectory(prefix="fasttfm-") as folder:
        try:
            with ZipFile(path) as archive:
                archive.extractall(folder)  # names that lead out of the folder are cut
        except (BadZipFile, OSError, NotImplementedError, RuntimeError, zlib.error) as error:
            raise UserError(f"{path}: is neither a folder nor a whole .zip of one ({error}): copy it again") from None
        yield Path(folder)


def settled(folder: Path) -> None:
    """Finish what a killed process left half replaced. Raises UserError where it cannot be finished."""
    folder = _root(folder)
    if is_unfinished(folder):
        _finish(folder)


def compare(folder: Path, remedy: str = _MADE_ANEW, *, weights: bool = True) -> None:
    """Compare a folder's files with its manifest.

    weights: also *.safetensors, which read_weights() compares. Raises UserError for the first file that is missing,
    damaged or was changed, and where the manifest is missing or damaged. remedy: against that.
    """
    folder = _root(folder)
    before = _manifest(folder)
    try:
        for path, digest in _listed(folder, read_manifest(folder)):
            if (weights or path.suffix != ".safetensors") and (fault := _fault(path, digest)):
                is_there = path.exists() or path.is_symlink()
                raise UserError(f"{fault}: {remedy if is_there else remedy.removeprefix('move it away and ')}")
    except UserError:
        if is_unfinished(folder) or _manifest(folder) != before:
            raise UserError(_BUSY.format(folder)) from None
        raise


def _listed(folder: Path, digests: Mapping[str, str]) -> list[tuple[Path, str]]:
    """The files that a manifest names, but those that users do change."""
    return [(folder / name, digest) for name, digest in digests.items() if name not in _UNREAD]


def faults(folder: Path) -> tuple[int, list[str]]:
    """The number of files that the manifests in a folder list, and a complaint for each that is damaged or missing.

    Its own manifest and those of its checkpoints count; prepared data and checkpoints must have theirs.
    """
    files: list[tuple[Path, str]] = []
    written = [path.parent for path in folder.glob("checkpoints/[!.]*/model.safetensors")]
    if (folder / "data.yaml").exists() and not (folder / "config.yaml").exists():
        written.append(folder)
    found = [f"{path / MANIFEST}: {_MISSING_MANIFEST}" for path in written if not (path / MANIFEST).exists()]
    for manifest in sorted(folder.rglob(MANIFEST)):
        inside = manifest.parent
        if any(part.startswith(".") for part in inside.relative_to(folder).parts):
            continue  # what is being written, or was left by a kill
        try:
            digests = read_manifest(inside) if has_manifest(inside) else _plain_manifest(manifest)
            files += _listed(inside, digests)
        except UserError as error:
            found.append(str(error))
    for path, digest in files:
        try:
            found += filter(None, [_fault(path, digest)])
        except UserError as error:
            found.append(str(error))
    return len(files), found


def _plain_manifest(path: Path) -> dict[str, str]:
    """The digests of a checkpoint, whose manifest has no header; UserError where it is cut off or cannot be read."""
    text = read_content(path).decode(errors="replace")
    digests = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64}) [ *](.+)\n", text, re.MULTILINE)}
    weights = {each.name for each in path.parent.glob("*.safetensors")}
    if len(digests) < max(1, len(text.splitlines())) or not weights <= digests.keys():
        raise UserError(f"{path}: is cut off or damaged")
    return digests


def _root(folder: Path) -> Path:
    """The folder that was written as a whole: this one, or the one it stands in, as the parts of an ELECTRA do."""
    if has_manifest(folder) or is_unfinished(folder) or not folder.is_dir():
        return folder
    around = folder.resolve().parent
    for root in (around / _READY, around):
        with suppress(UserError):
            if any(name.startswith(f"{folder.resolve().name}/") for name in read_manifest(root)):
                return around
    return folder


_BUSY = "{}: its files are being replaced by another process: wait for it, then run the same command again"
_OTHERS_MANIFEST = re.compile(rb"[0-9a-f]{64} ")
"""Beginning of a manifest by sha256sum, and of a checkpoint's."""


def has_manifest(folder: Path) -> bool:
    """Return whether a folder's files were written by replacing(); a damaged manifest is one."""
    content = _manifest(folder)
    return content is not None and not _OTHERS_MANIFEST.match(content)


@dataclass(frozen=True, slots=True)
class Owner:
    """The folder of a model or of data that a file belongs to."""

    folder: Path
    lists: bool
    """Whether its manifest has the file."""


def owner(path: Path) -> Owner | None:
    """Whose file it is that has this absolute path, or would be, by its name; None: nobody's but the user's."""
    for folder in path.parents:
        if has_manifest(folder) or any(_has(folder, *names) for names in _KEPT):
            name = path.relative_to(folder).as_posix()
            if path.exists() or any(fnmatch(name, pattern) for pattern in _NAMES):
                with suppress(UserError):
                    return Owner(folder, has_manifest(folder) and name in read_manifest(folder))
                return Owner(folder, True)
    return None


def _has(folder: Path, name: str, *others: str) -> bool:
    return (folder / name).is_file() and any((folder / other).exists() for other in others)


VOCABULARY_FILES = (
    *(f"spm{side}.model" for side in ("", ".src", ".tgt")),
    *(f"spm{side}.vocabulary.json" for side in ("", ".src", ".tgt")),
    "bytes.json",
    "tokenizer.json",
    *(f"bpe{side}.{kind}" for kind in ("codes", "vocabulary.json") for side in ("", ".src", ".tgt")),
)
"""Of a data or model directory, each where it has one."""
_KEPT = (
    ("config.yaml", "checkpoints", "model.safetensors", *VOCABULARY_FILES),
    ("data.yaml", *VOCABULARY_FILES),
    ("meta.json", "sha256sums"),
    ("config.json", "model.safetensors", "pytorch_model.bin", "model.bin"),
)
"""A folder with the first file and one of the others is that of a model or of data."""
_NAMES = (
    "config.yaml", "data.yaml", "config.json", "meta.json", "tokenizer.json", "bytes.json", "*.vocabulary.json",
    "*.model", "*.codes", "*.safetensors", "*.npy", "sha256sums", "train.log*.jsonl", ".*", "checkpoints/*",
)  # fmt: skip
"""Names of its files, in this version or another."""


_MISSING_MANIFEST = "is missing, so that damage could go unnoticed: make the folder anew, under another name"


def is_unfinished(folder: Path) -> bool:
    """Return whether files were being moved into place when a process was killed, or are now: two kinds lie there."""
    return (folder / _READY / MANIFEST).exists()


def read_manifest(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of each file that was written. Raises UserError where the manifest is missing or damaged."""
    return _read_manifest(folder)[1]


def _read_manifest(folder: Path) -> tuple[str, dict[str, str]]:
    """Return what a folder holds, and the digests of read_manifest()."""
    path = folder / MANIFEST
    remedy = "make the folder anew, under another name"
    header, *lines = read_content(path, _MISSING_MANIFEST).decode(errors="replace").splitlines(keepends=True) or [""]
    matches = [re.fullmatch(r"([0-9a-f]{64})  ([^/\n][^\n]*)\n", line) for line in lines]
    names = [match[2] for match in matches if match]
    begins = _HEADERS.fullmatch(header)
    if not begins or not names or len(names) < len(matches) or any(".." in name.split("/") for name in names):
        raise UserError(f"{path}: is {'damaged' if header else 'empty'}: {remedy}")
    return begins[1], {match[2]: match[1] for match in matches if match}


def _fault(path: Path, digest: str) -> str:
    """Say what is wrong with a file of this digest; '' for nothing. UserError for one that cannot be read."""
    try:
        if sha256(path) == digest:
            return ""
    except FileNotFoundError:
        return f"{path}: is missing"
    except OSError as error:
        raise unreadable(path, error) from error
    return f"{path}: is damaged or changed, its SHA-256 is not the one in {MANIFEST}"


def _manifest(folder: Path) -> bytes | None:
    with suppress(OSError):
        return (folder / MANIFEST).read_bytes()
    return None


def _files(folder: Path) -> list[str]:
    """The names of all files below a folder, with / between directories, sorted; a link is a file.

    What Python compiles when it imports a file there is nobody's.
    """
    names = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if Path(root, name).is_symlink()]
        names += [Path(root, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(names)


def _write_manifest(folder: Path, content: str) -> None:
    """Write the manifest of a folder's files; all of them, and it, are on the disk afterwards."""
    names = _files(folder)
    lines = (f"{sha256(folder / name)}  {name}\n" for name in names)
    write_file(folder / MANIFEST, (_HEADER.format(content) + "".join(lines)).encode())
    for name in names:
        sync(folder / name)
    for root, _, _ in os.walk(folder, topdown=False):
        sync(Path(root))


def _refuse_strangers(folder: Path, content: str) -> None:
    """Raise UserError for a folder that holds another kind of content, what no manifest lists, or what was changed."""
    known: dict[str, set[str]] = {}
    kinds = set()
    for root in (folder, folder / _READY):
        with suppress(UserError):
            kind, digests = _read_manifest(root)
            kinds.add(kind)
            for name, digest in digests.items():
                known.setdefault(name, set()).add(digest)
    for kind in kinds - {content}:
        raise UserError(
            f"{folder}: holds other files ({kind}) than are written here ({content}), which are not replaced: choose "
            "another --out, or move them away"
        )
    helpers = {LOCK_FILE, _NEW, _READY, *([MANIFEST] if known else [])}
    parents = {parent.as_posix() for name in known for parent in Path(name).parents}
    present, strangers = [], []
    for name in sorted(set(os.listdir(folder)) - helpers) if folder.is_dir() else []:
        if name.startswith(".git"):
            continue  # the folder is a repository, whose own files stay
        # a directory that the manifest knows is looked into, any other one is a stranger as a whole
        inside = [f"{name}/{each}" for each in _files(folder / name)] if name in parents else [name]
        present += inside
        strangers += [each for each in inside if each not in known]
    if strangers:
        shown = ", ".join(strangers[:_SHOWN]) + (f" and {len(strangers) - _SHOWN} more" if strangers[_SHOWN:] else "")
        kind = "this is a model directory" if "config.yaml" in strangers else "this directory holds other files"
        raise UserError(f"{folder}: {kind} ({shown}), which are not replaced: choose another --out, or move them away")
    for name in present:
        if sha256(folder / name) not in known[name]:
            raise UserError(
                f"{folder / name}: was changed since it was written, and is not replaced: move it away, or choose "
                "another --out"
            )


def _finish(folder: Path) -> None:
    """Move what is ready into its places; UserError where another process does so, or this one may not."""
    try:
        with locked(folder, "replacing its files"):
            _move_ready(folder)
    except UserError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise UserError(_BUSY.format(folder)) from None
        raise
    except OSError as error:
        raise UserError(
            f"{folder}: a process was stopped while it replaced the files, and the rest cannot be done: "
            f"{error.strerror}; run this command once as a user who may write there"
        ) from None


def _move_ready(folder: Path) -> None:
    """Put complete new files into their places, and remove the old ones. Killed anywhere, it can be done again."""
    ready = folder / _READY
    if not ready.exists():
        return
    if is_unfinished(folder):  # without a manifest it has been moved already, the last of all
        names = read_manifest(ready)
        with suppress(UserError):
            for name in read_manifest(folder):
                if name not in names:
                    (folder / name).unlink(missing_ok=True)
                    _remove_empty(folder, name)
        for name in names:
            if (ready / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(ready / name, folder / name)
        for parent in sorted({(folder / name).parent for name in names} | {folder}, reverse=True):
            sync(parent)
        os.replace(ready / MANIFEST, folder / MANIFEST)
        sync(folder)
    shutil.rmtree(ready)


def _remove_empty(folder: Path, name: str) -> None:
    """Remove the directories of a file that is gone, as far as nothing else is in them."""
    for parent in list(Path(name).parents)[:-1]:
        try:
            (folder / parent).rmdir()
        except OSError:
            return
