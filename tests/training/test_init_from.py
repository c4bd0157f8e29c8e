"""--init-from: a model that begins with another one's weights."""

from dataclasses import replace

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.weights import load_weights, model_weights
from fasttfm.training.translation import Translation
from tests.model_dirs import write_model_dir


def test_a_student_of_fewer_layers_begins_with_its_teacher_s(tmp_path, capsys):
    """The only decoder layer is the teacher's second, the last; everything else is the teacher's."""
    teacher = write_model_dir(tmp_path / "teacher")
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
