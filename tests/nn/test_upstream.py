"""PyTorch's own tests of these modules: their inputs, and where each of their behaviours is tested (behaviours.md)."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fasttfm.nn
from tests.peer_tests.__main__ import of_pytorch
from tests.peer_tests.suites import differences, judge

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(("every", "least"), [(4, 225), pytest.param(1, 900, marks=pytest.mark.whole)])
def test_the_inputs_that_torch_tests_itself_with(every: int, least: int) -> None:
    verdict = judge(of_pytorch("torch", "--every", str(every)), differences("pytorch"))
    assert not verdict.unexplained, verdict
    assert every > 1 or verdict.good, verdict  # of a part, a known difference may not be seen
    assert verdict.passed >= least


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 4, 8, 12])
def test_the_inputs_that_torch_tests_itself_with_on_the_kernels(first: int) -> None:
    words = ("triton", "--modes", "train", "--every", "16", "--first", str(first))
    verdict = judge(of_pytorch(*words), differences("pytorch"))
    assert not verdict.unexplained, verdict
    assert verdict.passed >= 40


def test_every_behaviour_names_tests_that_exist() -> None:
    lines = (HERE / "behaviours.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| test_")]
    assert len(rows) >= 60
    for upstream, behaviour, covered in rows:
        assert behaviour.strip(), upstream
        named = re.findall(r"(\w+)\.py::(\w+)", covered)
        assert named or covered.strip().startswith("not of the modules"), f"{upstream.strip()} is not covered"
        for file, test in named:
            actual = [p for p in HERE.parent.rglob(f"{file}.py") if f"def {test}(" in p.read_text(encoding="utf-8")]
            assert actual, f"{upstream.strip()}: there is no {file}.py::{test}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_until_the_modules_are_restored() -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True).eval()
    x = torch.randn(2, 4, 8)
    expected = layer(x)
    for module in (layer, layer.norm1, layer.self_attn, nn.Sequential(layer.norm1), nn.Sequential(layer.self_attn)):
        with pytest.raises(Exception, match=r"call fasttfm\.restore_modules\(model\) first"):
            torch.jit.script(module)
    fasttfm.restore_modules(layer)
    torch.testing.assert_close(torch.jit.script(layer)(x), expected)
