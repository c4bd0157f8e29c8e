"""Downloads that resume, are checked against a digest, and fall back to the next server.

    FOLDER/NAME           the whole file, checked
           NAME.part      what has arrived so far; the next attempt resumes it

206 resumes the part, 200 begins again, 416 means that the part is whole or wrong, 404 and its kind go to the next
server; a dropped connection or a server error is retried after a pause.
"""

import gzip
import hashlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fasttfm.errors import UserError
from fasttfm.system.locks import locked

if TYPE_CHECKING:
    import requests

ATTEMPTS = 5
"""Times that a server is tried without a byte more before the next one is."""
_BLOCK = 1 << 15
_TEXT = "text-"
_TIMEOUT = (15, 60)  # seconds to connect, and between two bytes


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that somebody publishes."""

    name: str
    """File name on disk."""
    urls: tuple[str, ...]
    """Addresses, the official one first."""
    digest: str | None = None
    """`sha256:…` or `md5:…` in hexadecimal; `text-sha256:…` of what a gzip file holds, where only that is known; None
    where its publisher gives none and we know none."""


def download(
    file: RemoteFile,
    folder: Path,
    *,
    mirrors: Sequence[str] = (),
    say: Callable[[str], None] = print,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
    pause: float = 1.0,
) -> Path:
    """The path of the whole, checked file in `folder`; nothing is fetched where it is there already.

    mirrors: addresses of folders that hold files of the same names, tried before the official places. say: gets a line
    for each event. progress: called with the bytes that are there and the total, where known. pause: seconds before a
    second attempt, doubled at each further one. Raises UserError when no server gives the file, or not the right one.
    """
    target = folder / file.name
    if target.exists():
        _check(target, file, "was put there by another: move it away to have it downloaded")
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
                    _check(part, file, f"is what {url} gives")
                except UserError as error:
                    part.unlink()  # another server's bytes cannot continue it
                    if not resumed:
                        raise
                    say(f"{error}, after what had arrived before: from the beginning")
                    _fetch(url, part, file, say, progress, pause)
                    _check(part, file, f"is what {url} gives")
            except (_NotThereError, UserError) as error:
                reasons.append(f"{url}: {error}" if isinstance(error, _NotThereError) else str(error))
                say(reasons[-1])
                continue
            except OSError as error:
                raise UserError(
                    f"{error.filename or part}: {error.strerror or error}: what has arrived is kept"
                ) from None
            os.replace(part, target)
            return target
    raise UserError(
        f"{file.name} could not be downloaded ({'; '.join(reasons)}): run the same command again to go on, name a "
        f"mirror (--mirror), or put the file into {folder}"
    )


class _NotThereError(Exception):
    """A server does not give the file."""


def _fetch(
    url: str,
    part: Path,
    file: RemoteFile,
    say: Callable[[str], None],
    progress: Callable[[int, int | None], None],
    pause: float,
) -> None:
    """Bring `part` to its full length. Raises _NotThereError where the server will not, OSError of the disk."""
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
                    reason = f"the server says {answer.status_code} {answer.reason}"
                    continue
                if answer.status_code == 416 and begin:
                    if _total(answer) == begin:
                        return
                    part.unlink()
                    reason = "the server holds another length than what had arrived"
                    continue
                if answer.status_code not in (200, 206):
                    raise _NotThereError(f"{answer.status_code} {answer.reason}")
                if answer.status_code == 200 or _first(answer) != begin:
                    begin = 0
                total = _total(answer)
                done = _receive(_raw(answer), part, begin, total, progress)
        except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL, requests.exceptions.MissingSchema):
            raise _NotThereError("is not an address that can be downloaded from") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            reason = f"the connection failed ({_short(error)})"
            continue
        if total is None or done == total:
            return
        reason = f"the connection ended after {done:,} of {total:,} bytes"
        if done > total:
            part.unlink()
            reason = f"{done:,} bytes came where {total:,} were announced"
    raise _NotThereError(reason)


def _receive(
    blocks: Iterable[bytes], part: Path, begin: int, total: int | None, progress: Callable[[int, int | None], None]
) -> int:
    """Append blocks to the first `begin` bytes of `part`; how many bytes it has then."""
    with part.open("r+b" if begin else "wb") as out:
        out.seek(begin)
        out.truncate()
        for block in blocks:
            # a byte more than was announced tells that more comes; no more than that is written
            out.write(block if total is None else block[: max(0, total + 1 - out.tell())])
            progress(out.tell(), total)
            if total is not None and out.tell() > total:
                break
        done = out.tell()
        out.flush()
        os.fsync(out.fileno())
    return done


def _raw(answer: "requests.Response") -> Iterator[bytes]:
    """The bytes of a body as they were sent, whatever Content-Encoding says, each as soon as it has arrived."""
    raw = answer.raw
    raw.enforce_content_length = False  # a body that ends early gives what there was of it
    read = getattr(raw, "read1", raw.read)  # urllib3 before 2.3 waits for a whole block
    while block := read(_BLOCK, decode_content=False):
        yield block


def _first(answer: "requests.Response") -> int:
    """The place of the first byte of a partial answer, -1 where it does not say."""
    match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return int(match[1]) if match else -1


def _total(answer: "requests.Response") -> int | None:
    """The length of the whole file, if the answer tells."""
    if match := re.search(r"/(\d+)$", answer.headers.get("Content-Range", "")):
        return int(match[1])
    length = answer.headers.get("Content-Length", "")
    return int(length) if answer.status_code == 200 and length.isdigit() else None


def _check(path: Path, file: RemoteFile, whose: str) -> None:
    if file.digest is None:
        return
    name, _, wanted = file.digest.partition(":")
    digest = hashlib.new(name.removeprefix(_TEXT), usedforsecurity=False)
    try:
        with gzip.open(path) if name.startswith(_TEXT) else path.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: is cut off or damaged ({error}); it {whose}") from None
    if digest.hexdigest() != wanted:
        what = f"{name.removeprefix(_TEXT).upper()}{' of its text' if name.startswith(_TEXT) else ''}"
        raise UserError(f"{path}: has the {what} {digest.hexdigest()} where {wanted} is right; it {whose}")


def _short(error: Exception) -> str:
    """The innermost reason that an error of requests has."""
    text = str(error)
    match = re.search(r"(\[Errno -?\d+\] [^')\]]+|timed out|Connection aborted|IncompleteRead|SSL[^')]*)", text)
    return match[1] if match else type(error).__name__
