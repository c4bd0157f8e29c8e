"""Prepared documents: what is written, how rows are cut, and one line for text that cannot be used."""

import gzip
import itertools

import numpy as np
import pytest
import torch

from fasttfm.errors import UserError
from fasttfm_pretraining.config.data import DocumentOptions
from fasttfm_pretraining.data.documents import Documents, PreparedDocuments, RowBatches
from fasttfm_pretraining.data.prepare_documents import prepare_documents
from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer

END = 3
LINES = [f"line {number} of  a  text, with the words that it has" for number in range(60)]
TEXT = "\n".join(LINES) + "\n"


def prepared(folder, content, name="text.txt", **options):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    chosen = DocumentOptions(**{"vocabulary": "bytes", **options})
    said: list[str] = []
    prepare_documents([folder / name], folder / "D", chosen, say=said.append)
    return PreparedDocuments.open(folder / "D"), said


def text_of(data, documents):
    return [data.tokenizer.decode(documents.read(*bounds)) for bounds in itertools.pairwise(documents.offsets)]


@pytest.mark.parametrize(("name", "pack"), [("text.txt", bytes), ("text.txt.gz", gzip.compress)])
def test_a_file_is_a_document_and_its_end_is_held_out(tmp_path, name, pack):
    data, _ = prepared(tmp_path, pack(TEXT.encode()), name, valid_share=0.1)
    (train,), (valid,) = text_of(data, data.train), text_of(data, data.valid)
    assert train + valid == TEXT
    assert 0 < len(valid) <= 0.1 * len(train + valid)
    assert data.valid.bytes == len(valid)
    assert int(data.train.read(0, data.train.tokens)[-1]) == data.tokenizer.end


@pytest.mark.parametrize("separator", ["", "<|endoftext|>"])
def test_a_separator_ends_a_document_and_is_no_text(tmp_path, separator):
    data, _ = prepared(tmp_path, f"\n{separator}\n".join(LINES) + "\n", document_separator=separator)
    assert text_of(data, data.train) + text_of(data, data.valid) == [f"{line}\n" for line in LINES]


def test_subwords_give_back_every_space_and_line_break(tmp_path):
    data, _ = prepared(tmp_path, TEXT, vocabulary="pieces", vocab_size=320)
    for text in ("  two  spaces \n\n and lines\n", "ünknown ▁ 漢字", ""):
        assert data.tokenizer.decode(data.tokenizer.encode(text)) == text
    assert data.train.tokens < 0.8 * data.train.bytes
    assert data.tokenizer.mask is not None
    assert data.tokenizer.mask not in data.train.read(0, data.train.tokens)
    assert "<mask>" in data.tokenizer.decode(data.tokenizer.encode("a <mask> that is text"))


def test_preparing_again_does_nothing_and_another_text_is_prepared(tmp_path):
    for text, last in ((TEXT, "ready"), (TEXT, "nothing to do"), (TEXT[:2000], "ready")):
        assert last in prepared(tmp_path, text)[1][-1]


@pytest.mark.parametrize("length", [3, 5, 8, 64])
def test_rows_hold_every_token_once_and_each_input_is_what_came_before_it(length):
    random = np.random.default_rng(0)
    lists = [random.integers(4, 50, size).tolist() for size in (4, 1, 9, 2, 2, 17)]
    documents = Documents.from_lists(lists, END)
    batches = RowBatches(documents, length, 2 * length, seed=1)
    rows = [documents.row(number, length) for number in range(batches.rows)]
    targets = np.concatenate([row[1] for row in rows])
    assert targets.tolist() == [token for each in lists for token in [*each, END]]
    assert np.concatenate([row[0] for row in rows]).tolist() == [END, *targets[:-1]]
    position = 0
    for inputs, _, lengths in rows:
        assert lengths.sum() == len(inputs)
        for size in lengths:
            inside = position % length != 0
            assert not inside or position in documents.offsets  # a sequence begins with a row or a document
            assert not set(range(position + 1, position + size)) & set(documents.offsets.tolist())
            position += size
    assert position == documents.tokens


def test_a_token_of_its_own_stands_before_documents():
    documents = Documents.from_lists([[5, 6], [7], [8, 9, 10]], END, begin=4)
    inputs, targets, lengths = documents.row(0, 4)
    assert (inputs.tolist(), targets.tolist(), lengths.tolist()) == ([4, 5, 6, 4], [5, 6, END, 7], [3, 1])
    inputs, targets, _ = documents.row(1, 4)
    assert (inputs.tolist(), targets.tolist()) == ([7, 4, 8, 9], [END, 8, 9, 10])
    assert documents.row(2, 4)[0].tolist() == [10]


def test_an_epoch_is_a_permutation_that_its_number_decides():
    documents = Documents.from_lists([list(range(4, 104))] * 5, END)
    batches, repeated = (RowBatches(documents, 8, 24, seed=7) for _ in range(2))
    first = np.concatenate(batches.epoch(0))
    assert sorted(first) == list(range(batches.rows))
    assert len(batches.epoch(0)) == len(batches)
    assert (first == np.concatenate(repeated.epoch(0))).all()
    assert not (first == np.concatenate(batches.epoch(1))).all()
    batch = batches.batch(batches.epoch(0)[0])
    assert batch.tokens.shape == (1, batch.target_tokens)
    assert batch.target_tokens == int(batch.lengths.sum())
    assert torch.equal(batch.tokens, batches.batch(batches.epoch(0)[0]).tokens)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n\n  \n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0", "not valid UTF-8"),
        (b"text\nmore\nthen a \0 byte\n" * 9, "not text"),
        (b"one line alone", "too few lines"),
        (b"\x1f\x8b\x08broken", "truncated or damaged"),
    ],
)
def test_a_file_that_is_no_text_ends_in_one_line(tmp_path, content, said):
    with pytest.raises(UserError, match=said) as error:
        prepared(tmp_path, content, "bad.txt")
    assert "bad.txt" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "D").exists()


@pytest.mark.parametrize("name", ["train.npy", "valid.offsets.npy", "bytes.json", "data.yaml"])
def test_damaged_data_end_in_one_line(tmp_path, name):
    data, _ = prepared(tmp_path, TEXT)
    (data.path / name).write_bytes((data.path / name).read_bytes()[:-3])
    with pytest.raises(UserError, match=r"prepare the data again|is damaged"):
        PreparedDocuments.open(data.path)


def test_wrong_options_and_files_end_in_one_line(tmp_path):
    with pytest.raises(UserError, match="--valid-share"):
        DocumentOptions(valid_share=0.7)
    (tmp_path / "text.txt").write_text(TEXT)
    for file, model in (("none", None), ("text.txt", tmp_path / "x.model")):
        with pytest.raises(UserError, match="no such file"):
            prepare_documents([tmp_path / file], tmp_path / "D", DocumentOptions(), model=model, say=print)
    with pytest.raises(UserError, match="holds no prepared documents"):
        PreparedDocuments.open(tmp_path)
    (tmp_path / "bytes.json").write_text('{"first_byte": 9}')
    with pytest.raises(UserError, match="damaged"):
        load_text_tokenizer(tmp_path)
