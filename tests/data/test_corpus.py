"""What reading parallel text promises about lines, bytes and broken files."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import sys
import threading
from pathlib import Path

import pytest

from fasttfm.data.corpus import ParallelText, StoredText, TextFile, decode_lines, read_lines
from fasttfm.errors import UserError


def test_only_newlines_end_a_line(tmp_path: Path):
    inner = ["a\u2028b", "c\x85d", "e\x0cf\x0bg\x1cz", "h\ri"]
    path = tmp_path / "odd.txt"
    path.write_bytes("\n".join(inner).encode() + b"\n")
    assert list(read_lines(path)) == inner


def test_line_ends_and_a_byte_order_mark_are_not_text(tmp_path: Path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo \r\nlast without end")
    assert list(read_lines(path)) == ["one", "", "two ", "last without end"]


@pytest.mark.parametrize(
    ("before", "advice"),
    [("größe\n", "correct that line$"), ("größ", "correct that line$"), ("plain\n", "or convert the file with iconv")],
)
def test_one_bad_byte_is_named_by_column_and_umlauts_are_never_advised_away(tmp_path: Path, before: str, advice: str):
    path = tmp_path / "text"
    path.write_bytes(before.encode() + b"ab\xff\n")
    line, column = (1, 7) if "\n" not in before else (2, 3)
    complaint = rf"text: line {line} is not valid UTF-8 at column {column} \(byte 0xff\): .*{advice}"
    with pytest.raises(UserError, match=complaint) as error:
        list(read_lines(path))
    assert "latin1" not in str(error.value)


def test_invalid_bytes_are_replaced_where_that_is_asked_for(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(b"good\nb\xffd\nsch\xc3\xb6n\n\xc3\n")
    text = TextFile(path, replace_invalid=True)
    assert list(text) == ["good", "b\ufffdd", "schön", "\ufffd"]
    assert text.replaced == [2, 4]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["schön\ngut\n", "\nplain text\n"])
def test_utf16_is_told_with_and_without_its_mark(tmp_path: Path, encoding: str, text: str):
    path = tmp_path / "text"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(UserError, match=r"UTF-16.*: convert it first, with iconv -f utf-16"):
        list(read_lines(path))


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
def test_packed_files_are_read_and_packed_streams_are_called_so(tmp_path: Path, pack, tool: str):
    path = tmp_path / "named.txt"
    path.write_bytes(pack("grün\nrot\n".encode()) + pack(b"blau\n"))
    text = TextFile(path)
    assert list(text) == ["grün", "rot", "blau"]
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=rf"standard input: is \w+ data: unpack it first, with {tool}"):
        list(decode_lines(io.BytesIO(path.read_bytes()), "standard input"))
    whole = pack("".join(f"line {i * i}\n" for i in range(9000)).encode())
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for broken in (whole[: len(whole) // 2], whole[: int(len(whole) * 0.98)], damaged):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"named\.txt: the \w+ data is cut off or damaged after line [\d,]+"):
            list(read_lines(path))


def test_packings_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / "text"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(UserError, match=r"text: is zstandard data, .* unpack it first, with zstd -d"):
        list(read_lines(path))
    path.write_bytes(b"PK\x03\x04" + bytes(20))
    with pytest.raises(UserError, match=r"text: is a zip file: unpack it first, with unzip"):
        list(read_lines(path))
    path.write_bytes(b"PAR1" + bytes(20))
    with pytest.raises(UserError, match=r"text: is a Parquet file: unpack it first, with pandas"):
        list(read_lines(path))
    path.write_text('<?xml version="1.0"?>\n<tmx version="1.4">\n')
    with pytest.raises(UserError, match=r"text: is XML, such as TMX or XLIFF: write its sentences out first"):
        list(read_lines(path))
    path.write_text("BZh9 is how a text may begin\n")
    assert list(read_lines(path)) == ["BZh9 is how a text may begin"]


def test_carriage_returns_alone_are_no_line_ends(tmp_path: Path):
    path = tmp_path / "mac"
    path.write_bytes(b"one\rtwo\rthree\r")
    with pytest.raises(UserError, match=r"mac: has 3 carriage returns and no line ends"):
        list(read_lines(path))
    path.write_bytes(b"a single line\r\n")
    assert list(read_lines(path)) == ["a single line"]


@pytest.mark.skipif(os.name == "nt", reason="needs named pipes")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read_once(tmp_path: Path, pack):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(pack(b"one\ntwo\n")))
    writer.start()
    text = TextFile(path)
    assert list(text) == ["one", "two"]
    assert len(text.sha256) == 64
    writer.join()


@pytest.mark.parametrize("after", [b"garbage", b"\x1f\x8b"])
def test_what_follows_gzip_data_is_refused_but_for_zeros(tmp_path: Path, after: bytes):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n") + bytes(100))
    assert list(read_lines(path)) == ["one", "two"]
    path.write_bytes(gzip.compress(b"one\n") + after)
    with pytest.raises(UserError, match="cut off or damaged after line 1"):
        list(read_lines(path))


@pytest.mark.parametrize(("source_lines", "target_lines"), [(3, 5), (5, 3)])
def test_unequal_line_counts_name_both_files_and_where_they_part(tmp_path: Path, source_lines: int, target_lines: int):
    source, target = tmp_path / "t.en", tmp_path / "t.de"
    source.write_text("x\n" * source_lines)
    target.write_text("y\n" * target_lines)
    short, long = (source, target) if source_lines < target_lines else (target, source)
    with pytest.raises(UserError) as error:
        list(ParallelText([source], [target]))
    assert str(error.value) == (
        f"{short} has 3 lines but {long} has 5: both must align line by line (first difference in count after line 3)"
    )


def test_empty_files_are_refused(tmp_path: Path):
    source, target = tmp_path / "t.en", tmp_path / "t.de"
    source.touch()
    target.touch()
    with pytest.raises(UserError, match=r"t\.en and .*t\.de are empty"):
        StoredText(ParallelText([source], [target]), tmp_path, "train")


def test_text_that_changes_after_it_was_read_is_neither_hashed_nor_used(tmp_path: Path):
    source, target = tmp_path / "t.en", tmp_path / "t.de"
    source.write_text("a\r\n \x0cb\x85\n")
    target.write_text("c\nd\n")
    before = hashlib.sha256(source.read_bytes()).hexdigest()
    stored = StoredText(ParallelText([source], [target]), tmp_path, "train")
    source.write_text("other\nlines\nand more of them\n")
    assert stored.sha256[0] == before
    assert [pair.source for pair in stored] == ["a", " \x0cb\x85"]
    stored.delete()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.de", "t.en"]


def test_several_files_are_one_corpus_with_its_own_line_numbers(tmp_path: Path):
    for name, lines in (("a.en", "1\n2\n"), ("a.de", "eins\nzwei\n"), ("b.en", "3\n"), ("b.de", "drei\n")):
        (tmp_path / name).write_text(lines)
    text = ParallelText([tmp_path / "a.en", tmp_path / "b.en"], [tmp_path / "a.de", tmp_path / "b.de"])
    stored = StoredText(text, tmp_path, "train")
    assert len(stored) == 3
    for each in (text, stored, stored):
        assert [(pair.source, pair.target, pair.file.name, pair.line) for pair in each] == [
            ("1", "eins", "a.en", 1),
            ("2", "zwei", "a.en", 2),
            ("3", "drei", "b.en", 1),
        ]
    assert stored.sha256 == [
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a.en", "b.en", "a.de", "b.de")
    ]
    with pytest.raises(UserError, match="2 source files but 1 target file:"):
        ParallelText([tmp_path / "a.en", tmp_path / "b.en"], [tmp_path / "a.de"])
