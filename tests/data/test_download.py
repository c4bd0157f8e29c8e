"""Downloads from a server with all kinds of faults."""

import gzip
import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from fasttfm.data import download as module
from fasttfm.data.download import RemoteFile, download
from fasttfm.errors import UserError

CONTENT = bytes(range(256)) * 4000
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Server(http.server.ThreadingHTTPServer):
    """answers: path -> function that answers a request. requests: (path, Range) of each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Callable[[Handler], None]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        self.server.answers.get(self.path, lambda handler: handler.send_error(404))(self)

    def log_message(self, *_: object) -> None:
        pass

    def give(self, content: bytes, status: int = 200, announced: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if announced is None else announced))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def first_byte(self) -> int:
        asked = self.headers.get("Range")
        return int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0


def whole(handler: Handler) -> None:
    """A correct server with range requests."""
    begin = handler.first_byte()
    if begin >= len(CONTENT):
        handler.give(b"", 416, Content_Range=f"bytes */{len(CONTENT)}")
    elif begin:
        handler.give(CONTENT[begin:], 206, Content_Range=f"bytes {begin}-{len(CONTENT) - 1}/{len(CONTENT)}")
    else:
        handler.give(CONTENT, Content_Encoding="gzip")  # whose decoding would fail: bytes are kept as they come


def gives(content: bytes, *given: int, **headers: str) -> Callable[[Handler], None]:
    """An answer without ranges."""
    return lambda handler: handler.give(content, *given, **headers)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetched(server: Server, folder: Path, *paths: str, digest: str | None = DIGEST, **options) -> tuple[Path, list]:
    said: list[str] = []
    file = RemoteFile("corpus.tgz", tuple(server.address + path for path in paths), digest)
    return download(file, folder, say=said.append, pause=0.0, **options), said


def test_a_file_is_fetched_once_from_a_mirror_first(server: Server, tmp_path: Path):
    server.answers["/mirror/a"] = whole
    seen: list[tuple[int, int | None]] = []
    options = {"mirrors": [f"{server.address}/mirror/"], "progress": lambda *sizes: seen.append(sizes)}
    path, said = fetched(server, tmp_path / "new", "/a", **options)
    assert path.read_bytes() == CONTENT
    assert not said
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    fetched(server, tmp_path / "new", "/a")
    assert server.requests == [("/mirror/a", None)]
    assert not path.with_name("corpus.tgz.part").exists()


@pytest.mark.parametrize(
    ("part", "answer", "said"),
    [
        (CONTENT[:70_000], whole, ""),
        (CONTENT, whole, ""),  # status 416
        (CONTENT + b"more", whole, "shorter than the partial download"),
        (b"x" * 1000, whole, "from the start"),  # of another file, as the digest shows
        (b"y" * 1000, gives(CONTENT), ""),  # a server without ranges
    ],
    ids=["killed", "whole", "longer", "another file", "no ranges"],
)
def test_the_next_run_resumes_a_partial_download_if_possible(server: Server, tmp_path: Path, part, answer, said):
    server.answers["/a"] = answer
    (tmp_path / "corpus.tgz.part").write_bytes(part)
    path, told = fetched(server, tmp_path, "/a")
    assert path.read_bytes() == CONTENT
    assert [said in line for line in told[:1]] == [True] * bool(said)
    assert server.requests[0] == ("/a", f"bytes={len(part)}-")


@pytest.mark.parametrize(
    ("places", "told"),
    [
        *((["/moved"], []), (["/nothing", "/good"], ["404"]), (["/bad", "/good"], ["SHA256"])),
        (["/busy"], ["503", "429", "500"]),
    ],
)
def test_redirections_are_followed_and_the_next_url_is_tried_after_a_fault(server: Server, tmp_path, places, told):
    server.answers |= {"/moved": gives(b"", 302, Location="/good"), "/good": whole, "/bad": gives(CONTENT[::-1])}
    statuses = iter([503, 429, 500])
    server.answers["/busy"] = lambda at: at.send_error(status) if (status := next(statuses, 0)) else whole(at)
    path, said = fetched(server, tmp_path, *places)
    assert path.read_bytes() == CONTENT
    assert [word in line for word, line in zip(told, said, strict=True)] == [True] * len(told)


TEXT = f"text-{DIGEST}"


@pytest.mark.parametrize(
    ("answer", "digest", "said"),
    [
        (gives(CONTENT[::-1]), DIGEST, "; it came from"),
        (gives(CONTENT, 200, len(CONTENT) + 1000), DIGEST, r"corpus\.tgz could not be downloaded .*connection"),
        (gives(CONTENT, 200, len(CONTENT) - 1000), DIGEST, "expected"),  # HTTP cuts off the rest
        (gives(CONTENT, 206, Content_Range="bytes 0-99/100"), DIGEST, "received 101 bytes where 100 were announced"),
        (gives(gzip.compress(CONTENT + b"!")), TEXT, "SHA256 of its text"),
        (gives(gzip.compress(CONTENT)[:-9]), TEXT, "truncated or damaged"),
    ],
)
def test_a_file_with_a_wrong_digest_or_length_is_never_kept(server: Server, tmp_path: Path, answer, digest, said):
    server.answers["/a"] = answer
    with pytest.raises(UserError, match=said):
        fetched(server, tmp_path, "/a", digest=digest)
    assert not (tmp_path / "corpus.tgz").exists()


def test_an_existing_file_with_a_wrong_digest_is_refused_and_kept(server: Server, tmp_path: Path):
    (tmp_path / "corpus.tgz").write_bytes(b"mine")
    with pytest.raises(UserError, match="move it away to download it again"):
        fetched(server, tmp_path, "/a")
    assert (tmp_path / "corpus.tgz").read_bytes() == b"mine"
    assert not server.requests


def test_a_full_disk_keeps_the_partial_download(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server.answers["/a"] = whole
    monkeypatch.setattr(module, "_receive", mock.Mock(side_effect=OSError(28, "No space left on device")))
    (tmp_path / "corpus.tgz.part").write_bytes(CONTENT[:5000])
    with pytest.raises(UserError, match="No space left on device: the partial download is kept"):
        fetched(server, tmp_path, "/a")
    assert (tmp_path / "corpus.tgz.part").read_bytes() == CONTENT[:5000]


@pytest.mark.parametrize("size", [20 * 1024, 600_000])
def test_a_server_that_drops_every_connection_still_completes(server: Server, tmp_path: Path, size: int):
    """After less than a block, more often than ATTEMPTS; and after more than a block."""

    def answer(handler: Handler) -> None:
        begin = handler.first_byte()
        headers = {"Content_Range": f"bytes {begin}-{len(CONTENT) - 1}/{len(CONTENT)}"} if begin else {}
        handler.give(CONTENT[begin : begin + size], 206 if begin else 200, len(CONTENT) - begin, **headers)

    server.answers["/a"] = answer
    path, said = fetched(server, tmp_path, "/a")
    assert path.read_bytes() == CONTENT
    assert said
    assert [asked for _, asked in server.requests[1:]] == [f"bytes={n}-" for n in range(size, len(CONTENT), size)]
