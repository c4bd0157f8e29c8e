"""torch.func over operators and modules: equals a loop over the samples, or is refused in one line."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from public_surface import SEED, Use, first, functions, input_count, modules
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, vmap

from fasttfm import functional as F

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FUNCTIONS = functions()
ROUTES = ["torch", "triton"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Turn torch's warning of a slow fallback into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        yield


def tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def looped(call: Callable[..., Any], inputs: list[Tensor], dims: tuple[int | None, ...]) -> tuple[Tensor, ...]:
    size = next(x.shape[dim] for x, dim in zip(inputs, dims, strict=True) if dim is not None)
    samples = [[x if dim is None else x.select(dim, n) for x, dim in zip(inputs, dims)] for n in range(size)]
    return tuple(torch.stack(outputs) for outputs in zip(*(tensors(call(*sample)) for sample in samples), strict=True))


def of_module(name: str, training: bool) -> Use:
    """The module as a function of its inputs and parameters."""
    module = modules()[name].train(training)
    inputs = [torch.randn(2, 5, 16) for _ in range(input_count(name))]
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def call(*x: Tensor) -> Tensor:
        given = dict(zip(parameters, x[len(inputs) :], strict=True))
        return first(functional_call(module, given, x[: len(inputs)]))

    return Use(call, [*inputs, *parameters.values()])


def assert_maps(call: Callable[..., Any], inputs: list[Tensor], several: list[range]) -> None:
    """Samples of some inputs, by their places, which are mapped over their second dimension."""
    for places in several:
        mapped = [torch.stack([x, x + 1, 2 * x], dim=1) if n in places else x for n, x in enumerate(inputs)]
        dims = tuple(1 if n in places else None for n in range(len(inputs)))
        torch.testing.assert_close(tensors(vmap(call, in_dims=dims)(*mapped)), looped(call, mapped, dims), **CLOSE)


def assert_differentiates(call: Callable[..., Any], inputs: list[Tensor], mapped: int) -> None:
    """Per-sample gradients of all inputs, the first ones mapped; and Jacobians."""

    def loss(*x: Tensor) -> Tensor:
        return sum(y.square().sum() for y in tensors(call(*x)) if y.requires_grad or y.is_floating_point())

    places = tuple(range(len(inputs)))
    dims = tuple(0 if n < mapped else None for n in places)
    samples = [torch.stack([x, x + 1]) if dim == 0 else x for x, dim in zip(inputs, dims)]
    actual = vmap(grad(loss, argnums=places), in_dims=dims)(*samples)
    torch.testing.assert_close(actual, looped(grad(loss, argnums=places), samples, dims), **CLOSE)

    def few(*x: Tensor) -> Tensor:
        return first(call(*x)).flatten()[:3]

    wanted = torch.autograd.functional.jacobian(few, tuple(inputs))
    torch.testing.assert_close(torch.autograd.functional.jacobian(few, tuple(inputs), vectorize=True), wanted, **CLOSE)
    torch.testing.assert_close(jacrev(few, argnums=places)(*inputs), wanted, **CLOSE)


@pytest.mark.sample(8)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_over_one_tensor_and_over_all(name: str, route: str) -> None:
    call, inputs = FUNCTIONS[name]
    with F.backend(route):
        assert_maps(call, [x.detach() for x in inputs], [range(1), range(len(inputs))])


@pytest.mark.sample(4)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_per_sample_gradients_and_jacobians(name: str, route: str) -> None:
    """Of samples (batch, length, width) and, if rows are independent, (width,)."""
    call, inputs = FUNCTIONS[name]
    inputs = [x.detach() for x in inputs]
    with F.backend(route):
        assert_differentiates(call, inputs, 1)
        if "norm" in name or name.startswith("feed_forward"):
            assert_differentiates(call, [x[0, 0] if x.dim() == 3 else x for x in inputs], 1)


@pytest.mark.sample(5)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(modules()))
def test_vmap_and_per_sample_gradients_of_modules(name: str, training: bool) -> None:
    """Also over an ensemble, whose parameters are mapped."""
    call, inputs = of_module(name, training)
    count = input_count(name)
    assert_maps(call, inputs, [range(count), *([range(count, len(inputs))] if len(inputs) > count else [])])
    if training:
        assert_differentiates(call, inputs, count)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("residual_add",)])
def test_forward_mode_is_refused_in_one_line(name: str) -> None:
    call, inputs = FUNCTIONS[name]
    with pytest.raises(RuntimeError, match=r"use fasttfm\.reference for it, or reverse mode") as caught:
        jacfwd(lambda x: first(call(x, *inputs[1:])))(inputs[0].detach())
    assert "\n" not in str(caught.value)


def test_dropout_follows_vmaps_randomness() -> None:
    x, residual = torch.ones(4, 3, 16), torch.zeros(3, 16)

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
    query, caches = torch.randn(2, 1, 2, 1, 8), torch.zeros(2, 2, 1, 2, 4, 8)

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.attention_with_cache(query, key, value, query, query, cache_lengths=2)

    expected = torch.stack([step(*each) for each in zip(query, *caches.clone())])
    torch.testing.assert_close(vmap(step)(query, *caches), expected, **CLOSE)
    assert caches[0, :, 0, :, 2].equal(query[:, 0, :, 0])
    with pytest.raises(RuntimeError, match=r"writes to \w+, which torch\.vmap does not map over"):
        vmap(step, (0, None, None))(query, *caches[:, 0])


@pytest.mark.filterwarnings("ignore:a second derivative is computed")
@pytest.mark.parametrize("name", ["layer_norm", "residual_rms_norm", "feed_forward_gelu"])
def test_a_jacobian_of_a_gradient(name: str) -> None:
    call, inputs = FUNCTIONS[name]
    x, *rest = (x.detach()[0, :2] if x.dim() == 3 else x.detach() for x in inputs)

    def loss(x: Tensor) -> Tensor:
        return first(call(x, *rest)).square().sum()

    torch.testing.assert_close(jacrev(grad(loss))(x), torch.autograd.functional.hessian(loss, x), **CLOSE)
