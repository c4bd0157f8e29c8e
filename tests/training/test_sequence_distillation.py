"""A teacher's translations as training data."""

from dataclasses import replace

import pytest
import torch

from fasttfm.checkpoints.weights import load_weights, model_weights
from fasttfm.cli.main import main
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.data.prepared import PreparedData
from fasttfm.decoding import Translator
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.training import sequence_distillation
from fasttfm.training.sequence_distillation import distill_translation
from fasttfm.training.translation import Translation
from tests.model_dirs import PAIRS, write_model_dir


@pytest.fixture
def teacher(tmp_path):
    return write_model_dir(tmp_path / "teacher")


@pytest.fixture
def data(tmp_path, teacher):
    (tmp_path / "train.src").write_text("".join(f"{line}\n" for line in [*PAIRS, "a boat"]))
    (tmp_path / "train.tgt").write_text("falsch\n" * (len(PAIRS) + 1))
    (tmp_path / "valid.src").write_text("a dog\n")
    (tmp_path / "valid.tgt").write_text("ein Hund\n")
    files = [[tmp_path / name] for name in ("train.src", "train.tgt", "valid.src", "valid.tgt")]
    prepare(*files, tmp_path / "data", PrepareOptions(max_length=30), models=[teacher / "spm.model"], say=str)
    return tmp_path / "data"


def pairs(path):
    given = PreparedData.open(path)
    decode = given.target_tokenizer.decode
    return [(decode(given.train.source(i)), decode(given.train.target(i))) for i in range(len(given.train))]


def test_targets_are_what_the_teacher_translates(tmp_path, teacher, data):
    assert main(["distill", "translation", str(teacher), "--data", str(data), "--out", str(tmp_path / "out")]) == 0
    sources = [*PAIRS, "a boat"]
    expected = Translator.from_directory(teacher, workers=1).translate(sources)
    written = pairs(tmp_path / "out")
    assert [source for source, _ in written] == sources
    assert [target for _, target in written] == [" ".join(target.split()) for target in expected]
    before, after = PreparedData.open(data), PreparedData.open(tmp_path / "out")
    assert after.target_tokenizer.model == before.target_tokenizer.model
    assert (after.path / "valid.tgt.txt").read_text() == "ein Hund\n"
    assert not (tmp_path / "out.partial").exists()


def test_it_goes_on_after_a_stop(tmp_path, teacher, data, monkeypatch):
    monkeypatch.setattr(sequence_distillation, "_CHUNK", 2)
    out, said = tmp_path / "out", []

    def stop(line: str) -> None:
        if line.startswith("translated 4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill_translation(teacher, data, out, say=stop, beam=2)
    with (tmp_path / "out.partial" / "train.tgt").open("a") as file:
        file.write("cut o")  # what a kill leaves
    with (tmp_path / "out.partial" / "train.src").open("a") as file:
        file.write("two\nmore\n")
    with pytest.raises(UserError, match="another teacher, search or data"):
        distill_translation(teacher, data, out, say=said.append, beam=3)
    distill_translation(teacher, data, out, say=said.append, beam=2)
    assert "going on after 4 sentences of 7" in said
    expected = Translator.from_directory(teacher, workers=1, beam=2).translate([*PAIRS, "a boat"])
    assert pairs(out) == list(zip([*PAIRS, "a boat"], [" ".join(target.split()) for target in expected]))


def test_the_data_that_is_read_is_not_written_over(teacher, data):
    with pytest.raises(UserError, match="is the data that is read"):
        distill_translation(teacher, data, data)


def test_a_student_of_fewer_layers_begins_with_its_teacher_s(tmp_path, teacher, capsys):
    """The only decoder layer is the teacher's second, the last; everything else is the teacher's."""
    taught = Transformer.from_pretrained(teacher)
    given, config = model_weights(taught), replace(taught.config, decoder_layers=1)
    student, task = Transformer(config), Translation()
    load_weights(student, task.weights_for(student, given), teacher)
    for name, tensor in model_weights(student).items():
        of_teacher = name.replace("decoder.layers.0", "decoder.layers.1")
        assert torch.equal(tensor, given[of_teacher]), name
    assert capsys.readouterr().err == "--init-from: of 2 decoder layers 2\n"
    wide = Transformer(replace(config, decoder_layers=3))
    with pytest.raises(UserError, match=r"it has no decoder\.layers\.2"):
        load_weights(wide, task.weights_for(wide, given), teacher)
