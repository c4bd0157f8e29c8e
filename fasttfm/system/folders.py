"""Atomic replacement of a folder's files, and integrity checks against a manifest of what was written.

    FOLDER/sha256sums     the manifest, in the format of `sha256sum --check sha256sums`
           .lock          locked while a command writes here
           .new/          files being written; left by a kill and deleted by the next run
           .ready/        complete files, being moved into place; after a kill the next process completes the move

Only files in the manifest are ever replaced. Readers start with reading() or settled(). The folder itself is never
renamed, so it may be a link, a mount point or a shell's working directory.
"""

import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from lzma import LZMAError
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
"""Files that no command reads and that users may edit."""


@dataclass(slots=True)
class Replacement:
    """A fresh directory for the new files of a folder."""

    path: Path
    commit: bool = True
    """Set to False to leave the folder unchanged."""


@contextmanager
def replacing(folder: Path, doing: str, content: str) -> Iterator[Replacement]:
    """Replace the files in `folder` by those written in the block; if the block raises, the folder is unchanged.

    doing: activity shown to a second process that finds the folder locked. content: type of the files, such as
    `prepared pairs`, stored in the manifest. Raises UserError if the folder has other content, unlisted or changed
    files, or is locked by another process, and for an OSError in the block, such as a full disk.
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
                with _os_errors(folder):
                    yield replacement
                    if replacement.commit:
                        _write_manifest(fresh, content)
                if replacement.commit:
                    _refuse_strangers(folder, content)  # again: minutes may have passed
                    fresh.rename(folder / _READY)  # from here on the new files are valid
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
def _os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # from standard output, not from a file here
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(f"{error.filename or folder}: {error.strerror}: {folder} is unchanged") from error


PREPARE_AGAIN = "move it away and prepare the data again"
_RESTORE = "copy it back, or recreate the folder"


@contextmanager
def reading(folder: Path, remedy: str = _RESTORE) -> Iterator[None]:
    """Ensure a consistent read: raises UserError at the end of the block if the files were replaced meanwhile.

    Starts with settled(folder) and compares all files but weights with the manifest, if there is one. Raises UserError
    as settled() and compare() do.
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
    """The path itself, or the temporary folder that a .zip is extracted into for the block.

    Raises UserError for a file that is not a .zip, or if the disk is full.
    """
    if not path.is_file():
        yield path
        return
    with TemporaryDirectory(prefix="fasttfm-") as folder:
        try:
            with ZipFile(path) as archive:
                archive.extractall(folder)  # sanitizes names that lead out of the folder
        except (BadZipFile, OSError, EOFError, ValueError, LZMAError, RuntimeError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise UserError(
                    f"{path}: cannot be unpacked into {folder} ({error.strerror}): free some space there, or give the "
                    "unpacked folder"
                ) from None
            reason = str(error) or "it ends early"
            raise UserError(f"{path}: is neither a folder nor a complete .zip ({reason}): copy it again") from None
        yield Path(folder)


def settled(folder: Path) -> None:
    """Complete a replacement that a killed process left unfinished.

    Raises UserError if another process is doing so, or if this one has no permission.
    """
    folder = _root(folder)
    if not is_unfinished(folder):
        return
    try:
        with locked(folder, "replacing its files"):
            _move_ready(folder)
    except UserError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise UserError(_BUSY.format(folder)) from None
        raise
    except OSError as error:
        raise UserError(
            f"{folder}: an interrupted replacement of its files cannot be completed: {error.strerror}; run this "
            "command once as a user with write permission"
        ) from None


def compare(folder: Path, remedy: str = _RESTORE, *, weights: bool = True) -> None:
    """Compare a folder's files with its manifest.

    weights: include *.safetensors, which read_weights() compares on its own. Raises UserError, with `remedy`, for the
    first file that is missing, damaged or changed, and for a missing or damaged manifest.
    """
    folder = _root(folder)
    before = _manifest(folder)
    try:
        for path, digest in _listed(folder, read_manifest(folder)):
            if (weights or path.suffix != ".safetensors") and (fault := _fault(path, digest)):
                exists = path.exists() or path.is_symlink()
                raise UserError(f"{fault}: {remedy if exists else remedy.removeprefix('move it away and ')}")
    except UserError:
        if is_unfinished(folder) or _manifest(folder) != before:
            raise UserError(_BUSY.format(folder)) from None
        raise


def _listed(folder: Path, digests: Mapping[str, str]) -> list[tuple[Path, str]]:
    """The files of a manifest, without those that users may edit."""
    return [(folder / name, digest) for name, digest in digests.items() if name not in _UNREAD]


def faults(folder: Path) -> tuple[int, list[tuple[str, str]]]:
    """The number of files in all manifests below a folder, and (message, remedy) for each damaged or missing file.

    The remedy is empty where the message ends in one. Includes the manifests of checkpoints; prepared data and
    checkpoints must have one.
    """
    files: list[tuple[Path, str]] = []
    required = [path.parent for path in folder.glob("checkpoints/[!.]*/model.safetensors")]
    if (folder / "data.yaml").exists() and not (folder / "config.yaml").exists():
        required.append(folder)
    found = [(f"{path / MANIFEST}: {_MISSING_MANIFEST}", "") for path in required if not (path / MANIFEST).exists()]
    for manifest in sorted(folder.rglob(MANIFEST)):
        inside = manifest.parent
        if any(part.startswith(".") for part in inside.relative_to(folder).parts):
            continue  # being written, or left by a kill
        try:
            digests = read_manifest(inside) if has_manifest(inside) else _plain_manifest(manifest)
            files += _listed(inside, digests)
        except UserError as error:
            found.append((str(error), ""))
    for path, digest in files:
        try:
            if fault := _fault(path, digest):
                found.append((fault, _RESTORE))
        except UserError as error:
            found.append((str(error), ""))
    return len(files), found


def _plain_manifest(path: Path) -> dict[str, str]:
    """The digests of a checkpoint's manifest, which has no header; UserError if it is truncated or unreadable."""
    text = read_content(path).decode(errors="replace")
    digests = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64}) [ *](.+)\n", text, re.MULTILINE)}
    weights = {each.name for each in path.parent.glob("*.safetensors")}
    if len(digests) < max(1, len(text.splitlines())) or not weights <= digests.keys():
        raise UserError(f"{path}: is truncated or damaged: copy it back")
    return digests


def _root(folder: Path) -> Path:
    """The folder with the manifest of these files: this one or its parent (the parts of an ELECTRA are subfolders)."""
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
"""Start of a manifest by sha256sum, and of a checkpoint's."""


def has_manifest(folder: Path) -> bool:
    """Whether a folder was written by replacing(); true for a damaged manifest too."""
    content = _manifest(folder)
    return content is not None and not _OTHERS_MANIFEST.match(content)


def owner(path: Path) -> tuple[Path, bool] | None:
    """The model or data directory of a file with this absolute path, existing or not; None for the user's own files.

    With whether its manifest contains the file.
    """
    for folder in path.parents:
        if has_manifest(folder) or any(_has(folder, *names) for names in _LAYOUTS):
            name = path.relative_to(folder).as_posix()
            if path.exists() or any(fnmatch(name, pattern) for pattern in _NAMES):
                with suppress(UserError):
                    return folder, has_manifest(folder) and name in read_manifest(folder)
                return folder, True
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
"""Possible vocabulary files of a data or model directory."""
_LAYOUTS = (
    ("config.yaml", "checkpoints", "model.safetensors", *VOCABULARY_FILES),
    ("data.yaml", *VOCABULARY_FILES),
    ("meta.json", "sha256sums"),
    ("config.json", "model.safetensors", "pytorch_model.bin", "model.bin"),
)
"""A model or data directory has the first file and one of the others."""
_NAMES = (
    "config.yaml", "data.yaml", "config.json", "meta.json", "tokenizer.json", "bytes.json", "*.vocabulary.json",
    "*.model", "*.codes", "*.safetensors", "*.npy", "sha256sums", "train.log*.jsonl", ".*", "checkpoints/*",
)  # fmt: skip
"""Names of its files, in this version or another."""


_RECREATE = "recreate the folder under another name"
_MISSING_MANIFEST = f"is missing, so damage would go unnoticed: {_RECREATE}"


def is_unfinished(folder: Path) -> bool:
    """Whether files are being moved into place, or a kill interrupted that: old and new files are mixed."""
    return (folder / _READY / MANIFEST).exists()


def read_manifest(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 for the files written. Raises UserError for a missing or damaged manifest."""
    return _read_manifest(folder)[1]


def _read_manifest(folder: Path) -> tuple[str, dict[str, str]]:
    """The type of content of a folder, and the digests of read_manifest()."""
    path = folder / MANIFEST
    header, *lines = read_content(path, _MISSING_MANIFEST).decode(errors="replace").splitlines(keepends=True) or [""]
    matches = [re.fullmatch(r"([0-9a-f]{64})  ([^/\n][^\n]*)\n", line) for line in lines]
    names = [match[2] for match in matches if match]
    written = _HEADERS.fullmatch(header)
    if not written or not names or len(names) < len(matches) or any(".." in name.split("/") for name in names):
        raise UserError(f"{path}: is {'damaged' if header else 'empty'}: {_RECREATE}")
    return written[1], {match[2]: match[1] for match in matches if match}


def _fault(path: Path, digest: str) -> str:
    """An error message if the file is missing or does not have this digest, else ''. UserError if it is unreadable."""
    try:
        if sha256(path) == digest:
            return ""
    except FileNotFoundError:
        return f"{path}: is missing"
    except OSError as error:
        raise unreadable(path, error) from error
    return f"{path}: is damaged or was changed, its SHA-256 differs from {MANIFEST}"


def _manifest(folder: Path) -> bytes | None:
    with suppress(OSError):
        return (folder / MANIFEST).read_bytes()
    return None


def _files(folder: Path) -> list[str]:
    """The sorted relative POSIX paths of all files and links below a folder, without __pycache__."""
    names = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if Path(root, name).is_symlink()]
        names += [Path(root, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(names)


def _write_manifest(folder: Path, content: str) -> None:
    """Write the manifest of a folder's files, and sync everything to disk."""
    names = _files(folder)
    lines = (f"{sha256(folder / name)}  {name}\n" for name in names)
    write_file(folder / MANIFEST, (_HEADER.format(content) + "".join(lines)).encode())
    for name in names:
        sync(folder / name)
    for root, _, _ in os.walk(folder, topdown=False):
        sync(Path(root))


def _refuse_strangers(folder: Path, content: str) -> None:
    """Raise UserError for a folder with another type of content, and for unlisted or changed files."""
    known: dict[str, set[str]] = {}
    for root in (folder, folder / _READY):
        try:
            other, digests = _read_manifest(root)
        except UserError:
            continue
        if other != content:
            raise UserError(
                f"{folder}: contains other files ({other}), which are not replaced by {content}: choose another --out, "
                "or move them away"
            )
        for name, digest in digests.items():
            known.setdefault(name, set()).add(digest)
    helpers = {LOCK_FILE, _NEW, _READY, *([MANIFEST] if known else [])}
    parents = {parent.as_posix() for name in known for parent in Path(name).parents}
    present, strangers = [], []
    for name in sorted(set(os.listdir(folder)) - helpers) if folder.is_dir() else []:
        if name.startswith(".git"):
            continue  # the folder is a repository; keep its own files
        # look only into directories that the manifest lists; any other one is unlisted as a whole
        inside = [f"{name}/{each}" for each in _files(folder / name)] if name in parents else [name]
        present += inside
        strangers += [each for each in inside if each not in known]
    if strangers:
        shown = ", ".join(strangers[:_SHOWN]) + (f" and {len(strangers) - _SHOWN} more" if strangers[_SHOWN:] else "")
        kind = "is a model directory" if "config.yaml" in strangers else "contains other files"
        raise UserError(f"{folder}: {kind} ({shown}), which are not replaced: choose another --out, or move them away")
    for name in present:
        if sha256(folder / name) not in known[name]:
            raise UserError(
                f"{folder / name}: was changed since it was written, so it is not replaced: move it away, or choose "
                "another --out"
            )


def _move_ready(folder: Path) -> None:
    """Move complete new files into place and remove the old ones. Can be repeated after a kill at any point."""
    ready = folder / _READY
    if not ready.exists():
        return
    if is_unfinished(folder):  # the manifest is moved last
        names = read_manifest(ready)
        with suppress(UserError):
            for name in read_manifest(folder):
                if name not in names:
                    (folder / name).unlink(missing_ok=True)
                    with suppress(OSError):
                        os.removedirs((folder / name).parent)  # if empty, as its parents; folder itself has .ready
        for name in names:
            if (ready / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(ready / name, folder / name)
        for parent in sorted({(folder / name).parent for name in names} | {folder}, reverse=True):
            sync(parent)
        os.replace(ready / MANIFEST, folder / MANIFEST)
        sync(folder)
    shutil.rmtree(ready)
