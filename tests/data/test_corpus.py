"""What reading parallel text promises about lines, bytes and broken files."""

import gzip
import io
import os
import threading
from pathlib import Path

import pytest

from fasttfm.data.corpus import ParallelText, decode_lines, read_lines
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


def test_gzip_is_told_by_its_content_not_by_its_name(tmp_path: Path):
    path = tmp_path / "named.txt"
    path.write_bytes(gzip.compress("grün\nrot\n".encode()))
    assert list(read_lines(path)) == ["grün", "rot"]


def test_a_wrong_byte_is_named_by_file_and_line(tmp_path: Path):
    path = tmp_path / "latin1.de"
    path.write_bytes("gut\nschön\n".encode("latin1"))
    with pytest.raises(UserError, match=r"latin1\.de: line 2 is not valid UTF-8 \(byte 0xf6 at byte 4"):
        list(read_lines(path))


@pytest.mark.parametrize("encoding", ["utf-16", "latin1"])
def test_the_likely_encoding_is_named(tmp_path: Path, encoding: str):
    path = tmp_path / "text"
    path.write_bytes("schön\n".encode(encoding))
    with pytest.raises(UserError, match=f"for example with iconv -f {encoding} -t utf-8"):
        list(read_lines(path))


def test_gzip_where_only_text_is_read_is_called_so():
    with pytest.raises(UserError, match="standard input: is gzip data: unpack it first"):
        list(decode_lines(io.BytesIO(gzip.compress(b"text\n")), "standard input"))


@pytest.mark.skipif(os.name == "nt", reason="needs named pipes")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read_once_and_refused_where_it_must_be_read_again(tmp_path: Path, pack):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(pack(b"one\ntwo\n")))
    writer.start()
    assert list(read_lines(path)) == ["one", "two"]
    writer.join()
    with pytest.raises(UserError, match="pipe: is a pipe or device, but it is read more than once: write it to a file"):
        ParallelText([path], [path]).check()


@pytest.mark.parametrize("after", [b"garbage", b"\x1f\x8b"])
def test_what_follows_gzip_data_is_refused_but_for_zeros(tmp_path: Path, after: bytes):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n") + bytes(100))
    assert list(read_lines(path)) == ["one", "two"]
    path.write_bytes(gzip.compress(b"one\n") + after)
    with pytest.raises(UserError, match="cut off or damaged after line 1"):
        list(read_lines(path))


@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_a_cut_off_gzip_is_refused(tmp_path: Path, keep: float):
    whole = gzip.compress("".join(f"line {i * i}\n" for i in range(9000)).encode())
    path = tmp_path / "cut.gz"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UserError, match=r"cut\.gz: the gzip data is cut off or damaged after line [\d,]+"):
        list(read_lines(path))


def test_a_damaged_gzip_is_refused(tmp_path: Path):
    data = bytearray(gzip.compress(b"some text\n" * 1000))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "damaged.gz"
    path.write_bytes(data)
    with pytest.raises(UserError, match="cut off or damaged"):
        list(read_lines(path))


def test_missing_files_and_directories_are_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"nothing\.en: no such file"):
        list(read_lines(tmp_path / "nothing.en"))
    with pytest.raises(UserError, match="this is a directory"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize(("source_lines", "target_lines"), [(3, 5), (5, 3)])
def test_unequal_line_counts_name_both_files_and_where_they_part(tmp_path: Path, source_lines: int, target_lines: int):
    source, target = tmp_path / "t.en", tmp_path / "t.de"
    source.write_text("x\n" * source_lines)
    target.write_text("y\n" * target_lines)
    short, long = (source, target) if source_lines < target_lines else (target, source)
    with pytest.raises(UserError) as error:
        ParallelText([source], [target]).check()
    assert str(error.value) == (
        f"{short} has 3 lines but {long} has 5: both must align line by line (first difference in count after line 3)"
    )


def test_empty_files_are_refused(tmp_path: Path):
    source, target = tmp_path / "t.en", tmp_path / "t.de"
    source.touch()
    target.touch()
    with pytest.raises(UserError, match=r"t\.en and .*t\.de are empty"):
        ParallelText([source], [target]).check()


def test_several_files_are_one_corpus_with_its_own_line_numbers(tmp_path: Path):
    for name, lines in (("a.en", "1\n2\n"), ("a.de", "eins\nzwei\n"), ("b.en", "3\n"), ("b.de", "drei\n")):
        (tmp_path / name).write_text(lines)
    text = ParallelText([tmp_path / "a.en", tmp_path / "b.en"], [tmp_path / "a.de", tmp_path / "b.de"])
    assert text.check() == 3
    assert [(pair.source, pair.target, pair.file.name, pair.line) for pair in text] == [
        ("1", "eins", "a.en", 1),
        ("2", "zwei", "a.en", 2),
        ("3", "drei", "b.en", 1),
    ]
    with pytest.raises(UserError, match="2 source files but 1 target files"):
        ParallelText([tmp_path / "a.en", tmp_path / "b.en"], [tmp_path / "a.de"])
