"""replace_modules and restore_modules: the same objects with the same results, on fasttfm's operators."""

import copy
import pickle
import sys
import warnings
from typing import Any

import pytest
import torch
from forked import run
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
    model = Model()
    modules, parameters = list(model.modules()), list(model.parameters())
    expected = model(*batch)
    report = fasttfm.replace_modules(model)
    assert [id(m) for m in model.modules()] == [id(m) for m in modules]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model(*batch), expected)
    # transformer, 2 stacks, 3 layers, 4 attentions, 7 norms in layers, 2 final norms, the model's norm
    assert len(report.replaced) == 20 == ours(model)
    assert not report.left


def test_a_dry_run_changes_nothing_and_says_what_it_would_do() -> None:
    model = Model()
    report = fasttfm.replace_modules(model, dry_run=True)
    assert len(report.replaced) == 20
    assert ours(model) == 0
    assert "20 modules would be replaced, 0 left" in str(report)
    assert "transformer.encoder.layers.0.self_attn" in str(report)
    assert "fasttfm.nn.MultiheadAttention" in str(report)


def test_a_model_built_of_our_modules_becomes_one_of_torch() -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, 12, 0.0, norm_first=True)
    stack = fasttfm.nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(S, N, E), torch.tensor([[False] * S, [False, False, True, True, True]])
    expected = stack(x, src_key_padding_mask=mask)
    fasttfm.restore_modules(stack)
    assert type(stack) is nn.TransformerEncoder
    with torch.no_grad():  # torch would nest here, if this layer could be nested
        torch.testing.assert_close(stack(x, src_key_padding_mask=mask), expected)


def test_an_optimizer_made_before_goes_on_training(batch: Any) -> None:
    plain = Model()
    replaced = copy.deepcopy(plain)
    losses: dict[str, list[float]] = {}
    for name, model in (("plain", plain), ("replaced", replaced)):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses[name] = []
        for step in range(4):
            if step == 1 and name == "replaced":
                fasttfm.replace_modules(model)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["replaced"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["plain"][3] < losses["plain"][0]


class MyNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_subclasses_and_overridden_forwards_are_left_and_named() -> None:
    model = Model()
    model.norm = MyNorm(E)
    wrapped = model.transformer.decoder.norm
    wrapped.forward = wrapped.forward
    report = fasttfm.replace_modules(model)
    assert set(report.left) == {"norm", "transformer.decoder.norm"}
    assert "derived from torch.nn.LayerNorm" in report.left["norm"]
    assert "forward of its own" in report.left["transformer.decoder.norm"]
    assert type(model.norm) is MyNorm
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


def test_a_state_dict_loads_without_the_modules(tmp_path: Any, batch: Any) -> None:
    model, plain = Model(), Model()
    fasttfm.replace_modules(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    torch.testing.assert_close(plain(*batch), model(*batch))


def test_an_object_that_only_claims_a_class_is_left_alone() -> None:
    """isinstance() trusts __class__; replace_modules must look at the real class."""

    class Claims(torch.nn.Module):
        @property
        def __class__(self):
            return torch.nn.LayerNorm

    model = torch.nn.Sequential(torch.nn.LayerNorm(4))
    model.add_module("claims", Claims())
    assert fasttfm.replace_modules(model).replaced == ["0"]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("None", "ModuleNotFoundError: fasttfm.convert.huggingface needs the package transformers"),
        (
            "types.SimpleNamespace(__version__='4.48.0')",
            "ImportError: fasttfm.convert.huggingface needs transformers 5.20 or newer; 4.48.0 is installed",
        ),
    ],
)
def test_a_missing_or_old_transformers_is_named_in_a_line(module: str, message: str) -> None:
    code = f"import sys, types; sys.modules['transformers'] = {module}; import fasttfm.convert.huggingface"
    result = run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip().splitlines()[-1].startswith(message)
