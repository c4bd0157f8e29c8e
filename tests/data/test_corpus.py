"""Parallel text: line ends, encodings, compression, damaged and misaligned files."""

import bz2
import gzip
import hashlib
import io
import lzma
import sys
from pathlib import Path

import pytest

from fasttfm.data.corpus import StoredText, TextFile, decode_lines, file_pairs, read_lines
from fasttfm.errors import UserError


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("a\u2028b\nc\x85d\ne\x0cf\x0bg\x1cz\nh\ri\n".encode(), ["a\u2028b", "c\x85d", "e\x0cf\x0bg\x1cz", "h\ri"]),
        (b"\xef\xbb\xbfone\r\n\r\ntwo \r\nlast without end", ["one", "", "two ", "last without end"]),
        (b"\xef\xbb\xbf", []),
        (b"BZh9 may start a text\n", ["BZh9 may start a text"]),
        (b"a single line\r\n", ["a single line"]),
        (gzip.compress(b"one\n") + gzip.compress(b"two\n") + bytes(100), ["one", "two"]),  # tapes add zeros
    ],
    ids=["only newlines end a line", "Windows", "empty", "like bzip2", "one line", "gzip and zeros"],
)
def test_lines_are_read(tmp_path: Path, content: bytes, lines: list[str]):
    path = tmp_path / "text"
    path.write_bytes(content)
    assert list(read_lines(path)) == lines


INVALID = r"line {} is not valid UTF-8 at column {} \(byte 0xff\): .*{}"
UTF16 = r"UTF-16.*: convert it first, with iconv -f utf-16"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("größe\nab".encode() + b"\xff\n", INVALID.format(2, 3, "correct that line$")),  # no iconv for UTF-8
        (b"plain\nab\xff\n", INVALID.format(2, 3, "or convert the file with iconv")),
        *[("schön\ngut\n".encode(encoding), UTF16) for encoding in ("utf-16", "utf-16-be")],
        ("\nplain text\n".encode("utf-16-le"), UTF16),  # the first line is a newline alone
        (gzip.compress(b"one\n", mtime=0) + b"garbage", "truncated or damaged after line 1"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "is zstandard data, .* decompress it first, with zstd -d"),
        (b"PK\x03\x04" + bytes(20), "is a zip file: decompress it first, with unzip"),
        (b'<?xml version="1.0"?>\n<tmx version="1.4">\n', "is XML, such as TMX or XLIFF: extract its sentences first"),
        (b"one\rtwo\rthree\r", "has 3 carriage returns and no line ends"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str):
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(UserError, match=f"text: .*{message}") as error:
        list(read_lines(tmp_path / "text"))
    assert "latin1" not in str(error.value)


def zstandard(data: bytes) -> bytes:
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd
    return zstd.compress(data)


@pytest.mark.parametrize(
    ("pack", "tool"),
    [(gzip.compress, "gunzip"), (lzma.compress, "xz -d"), (bz2.compress, "bunzip2"), (zstandard, "zstd -d")],
)
def test_compressed_files_are_read_and_compressed_streams_are_refused(tmp_path: Path, pack, tool: str):
    path = tmp_path / "named.txt"
    path.write_bytes(pack("grün\nrot\n".encode()) + pack(b"blau\n"))
    text = TextFile(path)
    assert list(text) == ["grün", "rot", "blau"]
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=rf"standard input: is \w+ data: decompress it first, with {tool}"):
        list(decode_lines(io.BytesIO(path.read_bytes()), "standard input"))
    whole = pack("".join(f"line {i * i}\n" for i in range(9000)).encode())
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for broken in (whole[: len(whole) // 2], whole[: int(len(whole) * 0.98)], damaged):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"named\.txt: the \w+ data is truncated or damaged after line [\d,]+"):
            list(read_lines(path))


@pytest.mark.parametrize(
    ("source_lines", "target_lines", "words"),
    [
        (3, 5, r"t\.en has 3 lines but \S*t\.de has 5: both must align line by line \(first .* after line 3\)"),
        (5, 3, r"t\.de has 3 lines but \S*t\.en has 5: both must align line by line \(first .* after line 3\)"),
        (0, 0, r"t\.en and .*t\.de are empty"),
    ],
)
def test_empty_files_and_unequal_line_counts_are_refused(tmp_path: Path, source_lines, target_lines, words):
    source, target = tmp_path / "t.en", tmp_path / "t.de"
    source.write_text("x\n" * source_lines)
    target.write_text("y\n" * target_lines)
    with pytest.raises(UserError, match=words):
        StoredText(file_pairs([source], [target]), tmp_path, "train")


def test_later_changes_of_a_file_are_neither_hashed_nor_used(tmp_path: Path):
    source, target = tmp_path / "t.en", tmp_path / "t.de"
    source.write_text("a\r\n \x0cb\x85\n")
    target.write_text("c\nd\n")
    before = hashlib.sha256(source.read_bytes()).hexdigest()
    stored = StoredText(file_pairs([source], [target]), tmp_path, "train")
    source.write_text("other\nlines\nand more of them\n")
    assert stored.sha256[0] == before
    assert [pair.source for pair in stored] == ["a", " \x0cb\x85"]
    stored.delete()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.de", "t.en"]
