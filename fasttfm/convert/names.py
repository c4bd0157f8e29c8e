"""Mapping between our parameter names and another system's, by tables that serve both directions.

A table maps our modules to theirs; each has a weight and a bias. Our packed attention projection, in_proj, may map to
several of their modules, whose parameters are stacked along the first dimension.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.config.model import TransformerConfig
from fasttfm.errors import UserError
from fasttfm.system.wording import counted

Table = Mapping[str, str | tuple[str, ...]]


class Parameter(NamedTuple):
    """A parameter of ours."""

    ours: str
    theirs: tuple[str, ...]
    """Parts stacked along the first dimension; the last one has the remaining rows."""


class TheirWeights(dict[str, Tensor]):
    """Weights by another system's names; UserError for missing weights, and for weights that are never read."""

    def __init__(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        """path: their file, for error messages."""
        super().__init__(weights)
        self.path = path
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self._read.add(name)
        weight = super().__getitem__(name)
        if not weight.is_floating_point():
            kind = str(weight.dtype).removeprefix("torch.")
            raise UserError(f"{self.path}: {name} holds {kind}: quantized weights are not read, save it as floats")
        return weight

    def get(self, name: str, default: Any = None) -> Any:
        """Return the weight, or default if it is missing."""
        if name not in self:
            return default
        return self[name]

    def __missing__(self, name: str) -> Tensor:
        raise UserError(f"{self.path}: its weights have no {name}: they are truncated, or of another architecture")

    def first(self, *names: str) -> Tensor:
        """Return the first weight that exists."""
        return self[next((name for name in names if name in self), names[0])]

    def refuse_other_layers(self, prefix: str, count: int, field: str) -> None:
        """Raise UserError unless the layers, named by prefix and number, are 0 to count - 1.

        field: the configuration field with the count, such as n_layer.
        """
        layers = {name.removeprefix(prefix).partition(".")[0] for name in self if name.startswith(prefix)}
        if layers != {str(number) for number in range(count)}:
            has = ", ".join(sorted(layers, key=lambda layer: (len(layer), layer))) or "none"
            raise UserError(
                f"{self.path}: its weights have the layers {prefix}{has}, where {field} is {count}: copy both from one "
                "model"
            )

    def refuse_rest(self, *ignored: str) -> None:
        """Raise UserError for weights that were not read. ignored: regular expressions of names to skip."""
        if rest := self._rest(ignored):
            raise UserError(
                f"{self.path}: has the weights {rest}, for which this model has no place: it is of another architecture"
            )

    def tell_rest(self, *ignored: str) -> None:
        """Warn of weights that were not read, such as other heads. ignored: as in refuse_rest()."""
        if rest := self._rest(ignored):
            message = f"{self.path}: left out the weights {rest}, for which this model has no place"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def refuse_other_copies(self, copies: Mapping[str, str]) -> None:
        """Raise UserError if a weight (key) differs from the weight that it is tied to (value)."""
        for name, origin in copies.items():
            if name in self and origin in self and not torch.equal(self[name], self[origin]):
                raise UserError(
                    f"{self.path}: {name} has other numbers than {origin}, though its configuration ties them: copy "
                    "both from one model"
                )

    def _rest(self, ignored: tuple[str, ...]) -> str:
        rest = [name for name in self if name not in self._read and not any(re.fullmatch(p, name) for p in ignored)]
        return f"{rest[0]} and {counted(len(rest) - 1, 'other')}" if len(rest) > 1 else "".join(rest)

    def ours(
        self, parameters: Iterable[Parameter], shapes: Mapping[str, torch.Size] | None = None
    ) -> dict[str, Tensor]:
        """Return the parameters by our names; UserError for one whose shape differs from that in `shapes`."""
        result = {}
        for ours, theirs in parameters:
            result[ours] = self._joined(theirs)
            if shapes is not None and result[ours].shape != shapes[ours]:
                raise UserError(
                    f"{self.path}: {', '.join(theirs)} is {tuple(result[ours].shape)}, where its configuration says "
                    f"{tuple(shapes[ours])}: copy both from one model"
                )
        return result

    def _joined(self, names: tuple[str, ...]) -> Tensor:
        """Concatenate parts along the first dimension; UserError if their shapes do not match."""
        parts = [self[name] for name in names]
        for name, part in zip(names, parts):
            if not part.dim() or part.shape[1:] != parts[0].shape[1:]:
                raise UserError(
                    f"{self.path}: {name} is {tuple(part.shape)}, and {names[0]} {tuple(parts[0].shape)}: they do not "
                    "fit each other"
                )
        return torch.cat(parts)


def renamed(weights: Mapping[str, Tensor], new_name: Callable[[str], str], path: Path) -> dict[str, Tensor]:
    """Rename weights; UserError, which names path, if two get the same name."""
    old: dict[str, str] = {}
    for name in weights:
        if (new := new_name(name)) in old:
            raise UserError(f"{path}: has {old[new]} and {name}, two names of one weight: it is of several models")
        old[new] = name
    return {new: weights[name] for new, name in old.items()}


def theirs(weights: Mapping[str, Tensor], parameters: Iterable[Parameter]) -> dict[str, Tensor]:
    """Return our parameters by another system's names, packed projections split."""
    result: dict[str, Tensor] = {}
    for ours, names in parameters:
        third = len(weights[ours]) // 3  # queries, keys and values are joined, or all but the queries
        parts = weights[ours].tensor_split([third * number for number in range(1, len(names))])
        result |= dict(zip(names, parts))
    return result


def parameters(
    table: Table, ours: str = "", theirs: str = "", kinds: tuple[str, ...] = ("weight", "bias")
) -> Iterator[Parameter]:
    """Yield the parameters of a table's modules. ours, theirs: name prefixes."""
    for module, names in table.items():
        separator = "_" if module.endswith("in_proj") else "."
        for kind in kinds:
            parts = (names,) if isinstance(names, str) else names
            yield Parameter(f"{ours}{module}{separator}{kind}", tuple(f"{theirs}{part}.{kind}" for part in parts))


class EncoderDecoderNames(NamedTuple):
    """Parameter names of an encoder-decoder Transformer in another system."""

    encoder: Table
    decoder: Table
    layer: str
    """Format of a layer's name, with {} for its number."""

    def parameters(self, config: TransformerConfig, prefix: str = "") -> Iterator[Parameter]:
        """Yield the parameters of all layers and final norms, without embeddings and output. prefix: of their names."""
        for side, layers, table in (
            ("encoder", config.encoder_layers, self.encoder),
            ("decoder", config.decoder_layers, self.decoder),
        ):
            for number in range(layers):
                layer = f"{prefix}{side}.{self.layer.format(number)}."
                yield from parameters(table, f"{side}.layers.{number}.", layer)
            if config.final_norm:
                yield from parameters({"norm": "layer_norm"}, f"{side}.", f"{prefix}{side}.")
