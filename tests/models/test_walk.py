"""The call path from a model's loss to a kernel launch stays short."""

import sys
from pathlib import Path

import fasttfm
from fasttfm.functional import backend

from .test_layer_node import model_and_batch

PACKAGE = Path(fasttfm.__file__).parent


def test_a_layers_launches_lie_at_most_six_files_below_the_loss():
    model, batch = model_and_batch()
    walks = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_qualname == "Launch.__call__":
            files = []
            while frame.f_code.co_name != "loss":
                frame = frame.f_back
                files.append(frame.f_code.co_filename)
            walks.add(tuple(dict.fromkeys(each for each in reversed(files) if each.startswith(str(PACKAGE)))))

    with backend("triton"):
        model.loss(*batch)  # creates plans
        sys.setprofile(note)
        try:
            model.loss(*batch)
        finally:
            sys.setprofile(None)
    layers = [walk for walk in walks if str(PACKAGE / "models" / "stack.py") in walk]
    assert {Path(walk[-1]).stem for walk in layers} >= {"layer_norm", "feed_forward"}
    assert max(map(len, layers)) <= 6, max(layers, key=len)
