"""Shared builders of single-operator cases."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import Absent, Provider
from fasttfm.kernels.proof.costs import Cost


def case(
    name: str, shape: dict[str, Any], passes: str, setting: Setting, costs: tuple[Cost, Cost], make: Callable
) -> Case:
    """Case of one operator; costs: of forward and backward."""
    forward, backward = costs
    cost = {"backward": backward, "forward+backward": forward + backward}.get(passes, forward)
    return Case(group="kernels", name=name, shape=shape, dtype=setting.dtype_name, passes=passes, cost=cost, make=make)


def operator(
    name: str,
    shape: dict[str, Any],
    passes: str,
    setting: Setting,
    costs: tuple[Cost, Cost],
    inputs: Callable[[int], tuple[Any, ...]],
    ours: Mapping[str, Provider],
    eager: Provider,
    others: Mapping[str, Callable[..., Provider]] = {},
    *,
    least_level: str = "standard",
    **options: Any,
) -> Case:
    """Case of ours, plain PyTorch (from least_level on also compiled), and others by name -> factory.

    A non-zero dropout in the shape is passed to all of them as dropout_p. options: of Work.
    """
    dropout = shape.get("dropout", 0.0)

    def providers(p: float) -> dict[str, Provider | Absent]:
        kwargs = {"dropout_p": p} if p else {}
        plain = partial(eager, **kwargs)
        compile = setting.at_least(least_level)
        return {
            **{name: partial(function, **kwargs) for name, function in ours.items()},
            peers.EAGER: plain,
            **({peers.COMPILE: peers.compiled(plain, setting.device)} if compile else {}),
            **{name: peers.provider(name, setting.device, partial(make, **kwargs)) for name, make in others.items()},
        }

    def make() -> Work:
        checked = providers(0.0) if dropout else None
        return Work(inputs=inputs, providers=providers(dropout), reference=eager, without_dropout=checked, **options)

    return case(name, shape, passes, setting, costs, make)
