"""The call path from a model's loss to a kernel launch stays short."""

import sys
from pathlib import Path

import fasttfm
from fasttfm.functional import backend

from .test_layer_node import model_and_batch

PACKAGE = Path(fasttfm.__file__).parent
MOST_FILES = 6


def files_to(frame) -> list[str]:
    """The files of fasttfm on the call path from the model's loss() to this frame."""
    names: dict[str, None] = {}
    while (code := frame.f_code).co_name != "loss":
        names[code.co_filename] = None
        frame = frame.f_back
    names[code.co_filename] = None
    return [Path(each).relative_to(PACKAGE).as_posix() for each in reversed(names) if str(PACKAGE) in each]


def test_a_layers_launches_lie_at_most_six_files_below_the_loss():
    model, batch = model_and_batch()
    walks = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_qualname == "Launch.__call__":
            walks.add(tuple(files_to(frame.f_back)))

    with backend("triton"):
        model.loss(*batch)  # creates plans
        sys.setprofile(note)
        try:
            model.loss(*batch)
        finally:
            sys.setprofile(None)
    layers = [walk for walk in walks if "models/stack.py" in walk]
    assert {walk[-1] for walk in layers} >= {"kernels/layer_norm.py", "kernels/feed_forward.py"}
    assert any(walk[-1].startswith("kernels/attention/") for walk in layers)
    assert max(map(len, layers)) <= MOST_FILES, max(layers, key=len)
