"""SWAG and labelled pairs: what is read, the line of what is wrong, and the batches made of it."""

import gzip
import json

import numpy as np
import pytest

from fasttfm.errors import UserError
from fasttfm_pretraining.data.pairs import LabelledText, label_names, label_numbers, read_pairs
from fasttfm_pretraining.data.squad import read_squad
from fasttfm_pretraining.data.swag import Choices, read_swag
from fasttfm_pretraining.data.task_batches import Examples, TaskBatches, evaluation_batches
from fasttfm_pretraining.data.task_inputs import Row
from fasttfm_pretraining.training import finetuning

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
LINE = '0,v1,7,"A man stands, still. He",A man stands,He,gold,runs.,"sits, down.",waits,is a cat.,1\n'


def test_swag_s_choices_begin_with_the_second_sentence(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(HEADER + LINE)
    assert read_swag(path) == [Choices("A man stands", ("He runs.", "He sits, down.", "He waits", "He is a cat."), 1)]
    path.write_text(HEADER.replace(",label", "") + LINE.replace(",1\n", "\n"))
    assert read_swag(path)[0].label is None
    path.write_text(path.read_text().replace("ending3", "ending3,label").replace("a cat.", "a cat.,-1"))
    assert read_swag(path, answered=False)[0].label is None  # a test file, whose labels hold a place


def test_pairs_in_three_forms_are_the_same(tmp_path):
    rows = [('A "quoted" one.', "Second.", "yes"), ("Other.", "Last, one.", "no")]
    (tmp_path / "a.tsv").write_text("left\tright\tlabel\n" + "".join("\t".join(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text('left,right,label\n"A ""quoted"" one.",Second.,yes\n' + 'Other.,"Last, one.",no\n')
    objects = [dict(zip(("left", "right", "label"), row)) for row in rows]
    packed = gzip.compress("".join(json.dumps(each) + "\n" for each in objects).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    expected = [LabelledText(*row) for row in rows]
    for name in ("a.tsv", "a.csv", "a.jsonl.gz"):
        assert read_pairs(tmp_path / name) == expected
    (tmp_path / "b.tsv").write_text("sentence\tlabel\nfine\t1\n")
    assert read_pairs(tmp_path / "b.tsv") == [LabelledText("fine", None, "1")]
    (tmp_path / "c.tsv").write_text("id\tx\ty\tlabel\n7\tone\ttwo\t0\n")
    assert read_pairs(tmp_path / "c.tsv", ["y"]) == [LabelledText("two", None, "0")]


def cut(lines):
    """The first half of a packed file."""
    packed = gzip.compress("".join(lines).encode())
    return packed[: len(packed) // 2]


DAMAGED = r"truncated or damaged after .*[\d,]+"
NUMBERS = [n * 7919 for n in range(3000)]


def test_every_file_gives_its_texts_in_the_order_of_the_training_file(tmp_path, monkeypatch):
    for name in ("kind_of_task", "load_text_tokenizer"):
        monkeypatch.setattr(finetuning, name, lambda *_: None)
    (tmp_path / "train.tsv").write_text("a\tb\tlabel\none\ttwo\t0\nthree\tfour\t1\n")
    (tmp_path / "valid.tsv").write_text("label\tb\ta\n1\tsix\tfive\n")
    files = finetuning.TaskFiles("classify", tmp_path, tmp_path / "train.tsv", tmp_path / "valid.tsv")
    assert files.given["valid"] == [LabelledText("five", "six", "1")]
    assert files.description["columns"] == ["a", "b"]  # so that predictions read theirs in this order too


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        (read_swag, "a.csv", HEADER, "has no rows"),
        (read_swag, "a.csv", HEADER + LINE + "1,v1,7\n", "line 3: has 3 fields, the header has 12"),
        (read_swag, "a.csv", HEADER + LINE.replace(",1\n", ",4\n"), "line 2: label is '4', it must be 0, 1, 2 or 3"),
        (read_swag, "a.csv", HEADER.replace("sent2", "sent3") + LINE, "line 2: has no column sent2"),
        (read_swag, "a.csv", HEADER + LINE + '1,v1,"cut', "line 3: unexpected end of data"),
        (read_pairs, "a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b"', "line 2: is truncated at column 13"),
        (read_pairs, "a.jsonl", "[1]\n", "line 1: is a list, must be an object"),
        (read_pairs, "a.tsv", "id\tx\ty\tlabel\n7\tone\ttwo\t0\n", "name the one or two texts with --columns"),
        (lambda path: read_pairs(path, ["z"]), "a.tsv", "x\ty\tlabel\none\ttwo\t0\n", "line 2: has no column z"),
        (read_pairs, "a.parquet", "", r"must end in \.csv, \.tsv or \.jsonl"),
        (read_swag, "a.csv.gz", cut([HEADER, LINE * 3000]), DAMAGED),
        (read_pairs, "a.tsv.gz", cut(["text\tlabel\n", *(f"some text {n}\t{n % 2}\n" for n in NUMBERS)]), DAMAGED),
        (read_pairs, "a.jsonl.gz", cut(f'{{"text": "text {n}", "label": {n % 2}}}\n' for n in NUMBERS), DAMAGED),
        (read_squad, "a.json.gz", cut([json.dumps({"data": [f"article {n}" for n in NUMBERS]})]), DAMAGED),
    ],
)
def test_a_wrong_file_says_its_line(tmp_path, read, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))
    assert "\n" not in str(error.value)


def labelled(*labels):
    return [LabelledText("t", None, label) for label in labels]


def test_labels_come_from_the_data():
    names = label_names(labelled("10", "9", "10", "2"), "f.tsv")
    assert names == ["2", "9", "10"]
    assert label_numbers(labelled("10", "9", "10", "2"), names, "f.tsv") == [2, 1, 2, 0]
    assert label_names(labelled("b", "a"), "f.tsv") == ["a", "b"]
    alike = [f"{'0' * left}1.{'0' * right}" for left in range(4) for right in range(4)]  # one number in 16 spellings
    assert label_names(labelled(*alike), "f.tsv") == sorted(alike)
    with pytest.raises(UserError, match="row 2 has the label '3', the model knows 1, 2"):
        label_numbers(labelled("1", "3"), ["1", "2"], "f.tsv")
    for labels, message in ((["1", "1"], "every row has the label '1'"), ([None], "row 1 has no label")):
        with pytest.raises(UserError, match=message):
            label_names(labelled(*labels), "f.tsv")


# Batches


def examples_of(lengths, choices=1):
    rows = [[Row(np.full(length, 5), length // 2)] * choices for length in lengths]
    return Examples(rows, np.arange(len(lengths)))


def test_an_epoch_has_every_example_once_within_the_budget():
    lengths = np.random.default_rng(0).integers(3, 40, 200)
    batches = TaskBatches(examples_of(lengths), max_tokens=160, seed=3)
    order = batches.epoch(1)
    assert sorted(np.concatenate(order).tolist()) == list(range(200))
    assert len(order) == len(batches)
    for indices in order:
        batch = batches.batch(indices)
        assert batch.tokens.numel() <= 160
        assert batch.labels.tolist() == indices.tolist()
        assert batch.lengths.tolist() == lengths[indices].tolist()
    assert [each.tolist() for each in batches.epoch(1)] == [each.tolist() for each in order]
    assert [each.tolist() for each in batches.epoch(2)] != [each.tolist() for each in order]
    largest = batches.batch(batches.largest()).tokens.numel()
    assert largest == max(batches.batch(indices).tokens.numel() for indices in order)
    cells = sum(batches.batch(indices).tokens.numel() for indices in order)
    assert batches.padding_ratio == pytest.approx(1 - lengths.sum() / cells)


def test_no_batch_is_wider_than_the_longest_example_and_evaluation_sees_each_once():
    examples = examples_of([100, 99, 97, 40])  # a model of 100 positions has no place for the grid's 104
    training, evaluation = TaskBatches(examples, max_tokens=400), [*evaluation_batches(examples, 400)]
    assert sorted(index for group, _ in evaluation for index in group) == [0, 1, 2, 3]
    for batch in (*map(training.batch, training.epoch(0)), *(batch for _, batch in evaluation)):
        assert batch.shape[1] <= 100


def test_choices_stay_together_and_count_in_the_budget():
    batches = TaskBatches(examples_of([10, 12, 9, 30], choices=4), max_tokens=100)
    assert batches.skipped == 1
    batch = batches.batch(batches.largest())
    assert batch.tokens.shape[0] == 4 * len(batch)
    assert batch.tokens.numel() <= 100
    with pytest.raises(ValueError, match="no example"):
        TaskBatches(examples_of([30], choices=4), max_tokens=100)


def test_segments_begin_with_the_second_text_and_end_with_it():
    batch = examples_of([4, 6]).batch([0, 1], 7)
    assert batch.segments.tolist() == [[0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0]]
    assert batch.tokens.tolist() == [[5] * 4 + [0] * 3, [5] * 6 + [0]]
    assert (batch.target_tokens, batch.source_tokens) == (2, 10)
