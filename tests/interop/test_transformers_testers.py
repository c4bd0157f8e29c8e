"""transformers' own tiny models, out of test files that the installed version cannot import as they are."""

import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm.interop import huggingface  # noqa: E402
from tests.registry import testers, verdicts  # noqa: E402

FILE = """
import unittest
import package_that_is_not_here
from transformers import BertConfig, BertModel, NameOfAnotherVersion
from package_that_is_not_here import decorator, Mixin
from ...shared import ids

if BertModel is not None:
    from transformers.models.bert import also_not_there

class Tester(Mixin):
    def prepare_config_and_inputs_for_common(self):
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
        config = BertConfig(**sizes, vocab_size=9)
        return config, {"input_ids": ids(), "attention_mask": ids() * 0}

@decorator("an argument")
class BertTest(Mixin, unittest.TestCase):
    all_model_classes = (BertModel,)
    other = also_not_there(1)

    def setUp(self):
        self.model_tester = Tester()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "tests" / "models" / "bert" / "test_modeling_bert.py"
    file.parent.mkdir(parents=True)
    file.write_text(FILE)
    tmp_path.joinpath("tests", "shared.py").write_text("import torch\ndef ids(): return torch.arange(8).view(2, 4)\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path


def test_a_test_file_of_another_version_gives_its_tiny_model(folder: Path) -> None:
    cases = testers.cases(folder)
    assert list(cases) == ["bert"]
    kind, config, inputs = testers.made(cases["bert"][0])
    assert kind is transformers.BertModel
    assert config.hidden_size == 16
    assert inputs["input_ids"].shape == (2, 4)


def test_it_is_compared_with_every_position_attended(folder: Path) -> None:
    huggingface.register()
    model, batches = verdicts.of_tester(testers.cases(folder)["bert"][0])
    assert batches["tester"][0]["attention_mask"].all()
    assert verdicts.compared(model, batches) == {"by name, tester": "equal", "accelerate, tester": "equal"}


def test_a_wrong_gradient_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * 1.01

    def wrong(model: torch.nn.Module) -> torch.nn.Module:
        ours = verdicts.accelerated(model)
        attention = ours.encoder.layer[0].attention.self.value
        attention.register_forward_hook(lambda module, inputs, output: Wrong.apply(output))
        return ours

    monkeypatch.setattr(verdicts, "WAYS", {"wrong": wrong})
    huggingface.register()
    found = verdicts.compared(*verdicts.of_tester(testers.cases(folder)["bert"][0]))
    assert found["wrong, tester"].startswith("gradient of ")
