"""--init-from: initialization from another model's weights."""

from dataclasses import replace

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.weights import load_weights, model_weights
from fasttfm.training.translation import Translation
from tests.model_dirs import write_model_dir


def test_a_student_of_fewer_layers_begins_with_its_teacher_s(tmp_path, capsys):
    """The only decoder layer is the teacher's second and last; all else is the teacher's."""
    teacher = write_model_dir(tmp_path / "teacher")
    model = Transformer.from_pretrained(teacher)
    weights, config = model_weights(model), replace(model.config, decoder_layers=1)
    student, task = Transformer(config), Translation()
    load_weights(student, task.weights_for(student, weights), teacher)
    for name, tensor in model_weights(student).items():
        assert torch.equal(tensor, weights[name.replace("decoder.layers.0", "decoder.layers.1")]), name
    assert capsys.readouterr().err == "--init-from: of 2 decoder layers 2\n"
    deep = Transformer(replace(config, decoder_layers=3))
    with pytest.raises(UserError, match=r"it has no decoder\.layers\.2"):
        load_weights(deep, task.weights_for(deep, weights), teacher)
