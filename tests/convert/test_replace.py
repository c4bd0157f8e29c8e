"""replace_modules and restore_modules: the same objects with the same results, on fasttfm's operators."""

import copy
import importlib
import pickle
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm
import fasttfm.nn
from fasttfm.nn.masks import causal_mask

N, S, L, E, H = 2, 5, 4, 8, 2


class Model(nn.Module):
    """A user's model built from torch.nn."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, E)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.transformer = nn.Transformer(E, H, 2, 1, 12, dropout, batch_first=True)
        self.norm = nn.LayerNorm(E)
        self.out = nn.Linear(E, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = causal_mask(target.shape[1], target.shape[1], target.device)
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        return self.out(self.norm(hidden))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(11, (N, S)), torch.randint(11, (N, L))


def ours(model: nn.Module) -> int:
    return sum(type(m).__module__.startswith("fasttfm.nn") for m in model.modules())


def test_every_supported_module_is_replaced_in_place_and_computes_the_same(batch: Any) -> None:
    """Modules and parameters are the same objects, so that an optimizer goes on; a dry run only says what it would do.

    20: transformer, 2 stacks, 3 layers, 4 attentions, 7 norms in layers, 2 final norms, the model's norm.
    """
    model = Model()
    modules, parameters, names = list(model.modules()), list(model.parameters()), model.state_dict().keys()
    expected = model(*batch)
    planned = str(fasttfm.replace_modules(model, dry_run=True))
    assert ours(model) == 0
    for word in ("20 modules would be replaced, 0 left", "encoder.layers.0.self_attn", "fasttfm.nn.MultiheadAttention"):
        assert word in planned
    report = fasttfm.replace_modules(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == names
    torch.testing.assert_close(model(*batch), expected)
    assert len(report.replaced) == 20 == ours(model)
    assert not report.left


def test_a_model_built_of_our_modules_becomes_one_of_torch() -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, 12, 0.0, norm_first=True)
    stack = fasttfm.nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(S, N, E), torch.tensor([[False] * S, [False, False, True, True, True]])
    expected = stack(x, src_key_padding_mask=mask)
    fasttfm.restore_modules(stack)
    assert type(stack) is nn.TransformerEncoder
    with torch.no_grad():  # torch would nest here, if this layer could be nested
        torch.testing.assert_close(stack(x, src_key_padding_mask=mask), expected)


class MyNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Claims(nn.Module):
    """isinstance() trusts __class__; replace_modules must look at the real class."""

    @property
    def __class__(self) -> type:
        return nn.LayerNorm


def test_subclasses_and_overridden_forwards_are_left_and_named() -> None:
    model = Model()
    model.norm = MyNorm(E)
    model.add_module("claims", Claims())
    wrapped = model.transformer.decoder.norm
    wrapped.forward = wrapped.forward
    report = fasttfm.replace_modules(model)
    assert set(report.left) == {"norm", "transformer.decoder.norm"}
    assert "derived from torch.nn.LayerNorm" in report.left["norm"]
    assert "forward of its own" in report.left["transformer.decoder.norm"]
    assert type(model.norm) is MyNorm
    assert "claims" not in report.replaced
    assert "18 modules replaced, 2 left" in str(report)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same_and_can_be_restored(how: str, tmp_path: Any, batch: Any) -> None:
    model = Model()
    fasttfm.replace_modules(model)
    if how == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert ours(copied) == 20
    assert torch.equal(copied(*batch), model(*batch))
    assert len(fasttfm.restore_modules(copied).replaced) == 20
    assert (ours(copied), ours(model)) == (0, 20)
    torch.testing.assert_close(copied(*batch), model(*batch))


@pytest.mark.parametrize("version", [None, "4.48.0"])
def test_a_missing_or_old_transformers_is_named(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", version and types.SimpleNamespace(__version__=version))
    monkeypatch.delitem(sys.modules, "fasttfm.convert.huggingface", raising=False)
    with pytest.raises(ImportError, match=f"needs .*transformers.*{version or ''}"):
        importlib.import_module("fasttfm.convert.huggingface")
