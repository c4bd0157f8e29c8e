"""torch.func over operators and modules: equals a loop over the samples, or is refused in one line."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from public_surface import SEED, first, functions, input_count, modules
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, vmap

from fasttfm import functional as F
from fasttfm.functional import torch_norms

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FUNCTIONS = functions()
MODULES = sorted(modules())
ROUTES = ["torch", "triton"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Turn torch's warning of a slow fallback into an error."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        yield


def tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def looped(call: Callable[..., Any], inputs: list[Tensor], dims: tuple[int | None, ...]) -> tuple[Tensor, ...]:
    size = next(x.shape[dim] for x, dim in zip(inputs, dims, strict=True) if dim is not None)
    samples = [[x if dim is None else x.select(dim, n) for x, dim in zip(inputs, dims)] for n in range(size)]
    return tuple(torch.stack(outputs) for outputs in zip(*(tensors(call(*sample)) for sample in samples), strict=True))


@pytest.mark.sample(8)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_over_one_tensor_and_over_all(name: str, route: str) -> None:
    call, inputs = FUNCTIONS[name]
    inputs = [x.detach() for x in inputs]
    with F.backend(route):
        for places in (range(1), range(len(inputs))):
            mapped = [torch.stack([x, x + 1, 2 * x], dim=1) if n in places else x for n, x in enumerate(inputs)]
            dims = tuple(1 if n in places else None for n in range(len(inputs)))
            actual = tensors(vmap(call, in_dims=dims)(*mapped))
            torch.testing.assert_close(actual, looped(call, mapped, dims), **CLOSE)


@pytest.mark.sample(4)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_per_sample_gradients_and_jacobians(name: str, route: str) -> None:
    use, inputs = FUNCTIONS[name]
    inputs = [x.detach() for x in inputs]

    def call(*x: Tensor) -> Any:
        with F.backend(route):
            return use(*x)

    def loss(*x: Tensor) -> Tensor:
        return sum(y.square().sum() for y in tensors(call(*x)) if y.requires_grad or y.is_floating_point())

    x = torch.stack([inputs[0], inputs[0] + 1])
    dims = (0, *[None] * (len(inputs) - 1))
    places = tuple(range(len(inputs)))
    actual = vmap(grad(loss, argnums=places), in_dims=dims)(x, *inputs[1:])
    torch.testing.assert_close(actual, looped(grad(loss, argnums=places), [x, *inputs[1:]], dims), **CLOSE)

    def few(*x: Tensor) -> Tensor:
        return first(call(*x)).flatten()[:3]

    wanted = torch.autograd.functional.jacobian(few, tuple(inputs))
    torch.testing.assert_close(torch.autograd.functional.jacobian(few, tuple(inputs), vectorize=True), wanted, **CLOSE)
    torch.testing.assert_close(jacrev(few, argnums=places)(*inputs), wanted, **CLOSE)


@pytest.mark.parametrize("name", MODULES)
def test_vmap_and_per_sample_gradients_of_modules(name: str) -> None:
    module = modules()[name]
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    inputs = [torch.randn(3, 2, 5, 16) for _ in range(input_count(name))]

    def loss(parameters: dict[str, Tensor], *x: Tensor) -> Tensor:
        return first(functional_call(module, parameters, x)).sin().mean()

    def one(x: tuple[Tensor, ...]) -> Tensor:
        return first(module(*x))

    dims = (0,) * len(inputs)
    for training in (True, False):
        module.train(training)
        (expected,) = looped(lambda *x: one(x), inputs, dims)
        torch.testing.assert_close(vmap(lambda *x: one(x))(*inputs), expected, **CLOSE)
    by_sample = vmap(grad(loss), in_dims=(None, *dims))(parameters, *inputs)
    for n in range(3):
        wanted = grad(loss)(parameters, *[x[n] for x in inputs])
        for key, value in wanted.items():
            torch.testing.assert_close(by_sample[key][n], value, **CLOSE)
    small = tuple(x[0, :1, :2] for x in inputs)

    def few(*x: Tensor) -> Tensor:
        return one(x)[..., :2]

    wanted = torch.autograd.functional.jacobian(few, small)
    torch.testing.assert_close(torch.autograd.functional.jacobian(few, small, vectorize=True), wanted, **CLOSE)
    torch.testing.assert_close(jacrev(few, argnums=tuple(range(len(small))))(*small), wanted, **CLOSE)
    if not parameters:
        return
    several = {name: torch.stack([p, p + 0.1, 2 * p]) for name, p in parameters.items()}  # an ensemble of models
    ensemble = vmap(loss, in_dims=(0, *[None] * len(inputs)))(several, *[x[0] for x in inputs])
    for n in range(3):
        expected = loss({name: p[n] for name, p in several.items()}, *[x[0] for x in inputs])
        torch.testing.assert_close(ensemble[n], expected, **CLOSE)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("residual_add",)])
def test_forward_mode_is_refused_in_one_line(name: str) -> None:
    call, inputs = FUNCTIONS[name]
    with pytest.raises(RuntimeError, match=r"use fasttfm\.reference for it, or reverse mode") as caught:
        jacfwd(lambda x: first(call(x, *inputs[1:])))(inputs[0].detach())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5, 5), (1, 1, 1, 5), (2, 2, 5, 5)])
def test_vmap_over_masks_and_lengths(shape: tuple[int, ...]) -> None:
    q, mask = torch.randn(3, 2, 2, 5, 8), torch.rand(3, *shape) > 0.5
    lengths = torch.tensor([[5, 1], [2, 3], [4, 0]])

    def call(q: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return F.attention(q, q, q, mask=mask, key_lengths=lengths)

    for dims in ((0, 0, 0), (0, None, 0), (None, 0, None), (0, 0, None)):
        inputs = [x if dim == 0 else x[0] for x, dim in zip((q, mask, lengths), dims, strict=True)]
        torch.testing.assert_close(vmap(call, in_dims=dims)(*inputs), looped(call, inputs, dims)[0], **CLOSE)


def test_offsets_map_beside_a_window_that_leaves_out_bands_of_keys() -> None:
    q, offsets = torch.randn(3, 2, 2, 150, 8), torch.tensor([[1, 2], [3, 4], [0, 5]])

    def call(q: Tensor, offsets: Tensor) -> Tensor:
        return F.attention(q, q, q, causal=True, causal_offset=offsets, window=(70, 0))

    for dims in ((0, 0), (0, None), (None, 0)):
        inputs = [x if dim == 0 else x[0] for x, dim in zip((q, offsets), dims, strict=True)]
        torch.testing.assert_close(vmap(call, in_dims=dims)(*inputs), looped(call, inputs, dims)[0], **CLOSE)


def test_samples_fold_into_one_call_if_only_rows_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, normalise = [], torch_norms.normalise
    monkeypatch.setattr(torch_norms, "normalise", lambda x, *rest: shapes.append(tuple(x.shape)) or normalise(x, *rest))
    weight = torch.randn(16)
    vmap(lambda x: F.layer_norm(x, weight, None))(torch.randn(7, 3, 16))
    vmap(lambda x: F.layer_norm(x, weight, None))(torch.randn(7, 16))
    vmap(vmap(lambda x: F.layer_norm(x, weight, None)))(torch.randn(4, 7, 3, 16))
    assert shapes == [(21, 16), (7, 16), (84, 16)]
    assert vmap(lambda x: F.layer_norm(x, weight, None))(torch.randn(0, 3, 16)).shape == (0, 3, 16)
    by_weight = vmap(lambda w: F.layer_norm(torch.ones(3, 16), w, None))(torch.randn(0, 16))
    assert by_weight.shape == (0, 3, 16)


def test_dropout_follows_vmaps_randomness() -> None:
    x = torch.ones(4, 3, 16)
    residual = torch.zeros(3, 16)

    def drop(x: Tensor, **seed: Tensor) -> Tensor:
        return F.residual_add(x, residual, dropout_p=0.5, **seed)

    seeded = vmap(lambda x: drop(x, seed=SEED))(x)
    assert torch.equal(seeded, drop(x[0], seed=SEED).expand(4, 3, 16))
    same = vmap(drop, randomness="same")(x)
    assert all(torch.equal(same[0], y) for y in same)
    different = vmap(drop, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(drop)(x)


def test_an_operator_that_mutates_a_tensor_needs_vmap_over_it() -> None:
    target = torch.tensor([1, 0, 2])

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x * 1.0, target, inplace=True)[0]

    x = torch.randn(4, 3, 5)
    expected = looped(grad(loss), [x], (0,))[0]
    torch.testing.assert_close(vmap(grad(loss))(x), expected, **CLOSE)
    targets = torch.stack([target, target.flip(0)])
    logits = torch.randn(3, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"cross_entropy_consume writes to logits, which torch\.vmap does not map"):
        vmap(lambda t: F.cross_entropy(logits * 1.0, t, inplace=True)[0])(targets)


@pytest.mark.parametrize(
    "transform", [grad, vmap, lambda f: vmap(grad(f)), jacrev], ids=["grad", "vmap", "both", "jac"]
)
def test_torch_compile_captures_transformed_operators(transform) -> None:
    weight = torch.randn(16)
    transformed = transform(lambda x: F.rms_norm(x, weight).square().sum())
    torch._dynamo.reset()
    compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 16)
    torch.testing.assert_close(compiled(x), transformed(x), **CLOSE)
