"""Downloads that resume, verify a digest, and fall back to the next server.

    FOLDER/NAME           the complete, verified file
           NAME.part      a partial download; the next attempt resumes it

206 resumes the part, 200 starts again, 416 means that the part is complete or wrong, other client errors go to the next
server; a dropped connection or a server error is retried after a pause.
"""

import gzip
import hashlib
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttfm.errors import UserError
from fasttfm.system.locks import locked

if TYPE_CHECKING:
    import requests

ATTEMPTS = 5
"""Attempts per server without progress."""
_BLOCK = 1 << 15
_TEXT = "text-"
_TIMEOUT = (15, 60)  # seconds to connect, and between two bytes


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A published file."""

    name: str
    """File name on disk."""
    urls: tuple[str, ...]
    """URLs, the official one first."""
    digest: str | None = None
    """`sha256:…` or `md5:…` in hexadecimal; `text-sha256:…` for the content of a gzip file; None if none is known."""


def download(
    file: RemoteFile,
    folder: Path,
    *,
    mirrors: Sequence[str] = (),
    say: Callable[[str], None] = print,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
    pause: float = 1.0,
) -> Path:
    """Download a file into `folder` unless it exists, verify it, and return its path.

    mirrors: URLs of folders with files of the same names, tried before the official URLs. say: called with a line per
    event. progress: called with the bytes received and the total, if known. pause: seconds before the second attempt,
    doubled for each further one. Raises UserError if no server has the file, or if its digest is wrong.
    """
    target = folder / file.name
    if target.exists():
        _check(target, file, "existed before: move it away to download it again")
        return target
    published = file.urls[0].rpartition("/")[2]
    urls = (*(f"{mirror.rstrip('/')}/{published}" for mirror in mirrors), *file.urls)
    part = folder / f"{file.name}.part"
    reasons = []
    with locked(folder, "downloading into it"):
        for url in urls:
            resumed = part.exists()
            try:
                _fetch(url, part, file, say, progress, pause)
                try:
                    _check(part, file, f"came from {url}")
                except UserError as error:
                    part.unlink()  # do not resume it from another server
                    if not resumed:
                        raise
                    say(f"{error}, resuming an earlier part: downloading it from the start")
                    _fetch(url, part, file, say, progress, pause)
                    _check(part, file, f"came from {url}")
            except (_UnavailableError, UserError) as error:
                reasons.append(f"{url}: {error}" if isinstance(error, _UnavailableError) else str(error))
                say(reasons[-1])
                continue
            except OSError as error:
                raise UserError(
                    f"{error.filename or part}: {error.strerror or error}: the partial download is kept"
                ) from None
            os.replace(part, target)
            return target
    raise UserError(
        f"{file.name} could not be downloaded ({'; '.join(reasons)}): run the same command again to resume, name a "
        f"mirror (--mirror), or put the file into {folder}"
    )


class _UnavailableError(Exception):
    """The server does not provide the file."""


def _fetch(
    url: str,
    part: Path,
    file: RemoteFile,
    say: Callable[[str], None],
    progress: Callable[[int, int | None], None],
    pause: float,
) -> None:
    """Complete `part`. Raises _UnavailableError if the server does not provide it, OSError from the disk."""
    import requests
    import urllib3

    reason, attempt, most = "", 0, 0
    while attempt < ATTEMPTS:
        begin = part.stat().st_size if part.exists() else 0
        if reason:
            attempt, most = (0, begin) if begin > most else (attempt + 1, most)
            say(f"{file.name}: {reason}; trying again")
            time.sleep(pause * 2**attempt)
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={begin}-"} if begin else {})}
        try:
            with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as answer:
                if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
                    reason = f"the server answered {answer.status_code} {answer.reason}"
                    continue
                if answer.status_code == 416 and begin:
                    if _total(answer) == begin:
                        return
                    part.unlink()
                    reason = "the server's file is shorter than the partial download"
                    continue
                if answer.status_code not in (200, 206):
                    raise _UnavailableError(f"{answer.status_code} {answer.reason}")
                resumes = answer.headers.get("Content-Range", "").startswith(f"bytes {begin}-")
                if answer.status_code == 200 or not resumes:
                    begin = 0
                total = _total(answer)
                done = _receive(answer.raw, part, begin, total, progress)
        except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL, requests.exceptions.MissingSchema):
            raise _UnavailableError("not a valid http(s) URL") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            reason = f"the connection failed ({_short(error)})"
            continue
        if total is None or done == total:
            return
        reason = f"the connection ended after {done:,} of {total:,} bytes"
        if done > total:
            part.unlink()
            reason = f"received {done:,} bytes where {total:,} were announced"
    raise _UnavailableError(reason)


def _receive(raw: Any, part: Path, begin: int, total: int | None, progress: Callable[[int, int | None], None]) -> int:
    """Append a body after the first `begin` bytes of `part`; returns its size.

    raw: urllib3's response, whose bytes are read as soon as they arrive, whatever their Content-Encoding.
    """
    raw.enforce_content_length = False  # a body that ends early is returned, not an error
    read = getattr(raw, "read1", raw.read)  # urllib3 before 2.3 waits for a whole block
    with part.open("r+b" if begin else "wb") as out:
        out.seek(begin)
        out.truncate()
        while block := read(_BLOCK, decode_content=False):
            # one byte beyond the announced total shows that the body is too long; write no more
            out.write(block if total is None else block[: max(0, total + 1 - out.tell())])
            progress(out.tell(), total)
            if total is not None and out.tell() > total:
                break
        done = out.tell()
        out.flush()
        os.fsync(out.fileno())
    return done


def _total(answer: "requests.Response") -> int | None:
    """Size of the whole file, if the response has it."""
    if match := re.search(r"/(\d+)$", answer.headers.get("Content-Range", "")):
        return int(match[1])
    length = answer.headers.get("Content-Length", "")
    return int(length) if answer.status_code == 200 and length.isdigit() else None


def _check(path: Path, file: RemoteFile, origin: str) -> None:
    if file.digest is None:
        return
    name, _, expected = file.digest.partition(":")
    digest = hashlib.new(name.removeprefix(_TEXT), usedforsecurity=False)
    try:
        with gzip.open(path) if name.startswith(_TEXT) else path.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: is truncated or damaged ({error}); it {origin}") from None
    if digest.hexdigest() != expected:
        what = f"{name.removeprefix(_TEXT).upper()}{' of its text' if name.startswith(_TEXT) else ''}"
        raise UserError(f"{path}: the {what} is {digest.hexdigest()}, expected {expected}; it {origin}")


def _short(error: Exception) -> str:
    """The innermost reason of an error from requests."""
    text = str(error)
    match = re.search(r"(\[Errno -?\d+\] [^')\]]+|timed out|Connection aborted|IncompleteRead|SSL[^')]*)", text)
    return match[1] if match else type(error).__name__
