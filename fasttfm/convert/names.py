"""Names of parameters here and in another system's files: tables that are read in both directions.

A table has modules of ours and theirs, each with a weight and a bias. Where ours is the joint projection of attention,
in_proj, theirs may be several modules, whose parameters are the parts of ours one below the other.
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
    """The parts that it is made of, along its first dimension; the last one has the rows that are left."""


class TheirWeights(dict[str, Tensor]):
    """Weights by another system's names; UserError for one that is asked for and missing, or there and never read."""

    def __init__(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        """path: what they were read from, for errors."""
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
        """The weight of that name, or default."""
        if name not in self:
            return default
        return self[name]

    def __missing__(self, name: str) -> Tensor:
        raise UserError(f"{self.path}: its weights have no {name}: they are cut off, or of another architecture")

    def first(self, *names: str) -> Tensor:
        """The first of these that is there."""
        return self[next((name for name in names if name in self), names[0])]

    def refuse_other_layers(self, prefix: str, number: int, said: str) -> None:
        """Raise UserError where the layers, whose names begin with prefix and a number, are not 0 to number - 1.

        said: the field that says so, such as config.json's n_layer.
        """
        found = {name.removeprefix(prefix).partition(".")[0] for name in self if name.startswith(prefix)}
        if found != {str(each) for each in range(number)}:
            has = ", ".join(sorted(found, key=lambda each: (len(each), each))) or "none"
            raise UserError(
                f"{self.path}: its weights have the layers {prefix}{has}, where {said} is {number}: copy both from one "
                "model"
            )

    def refuse_rest(self, *known: str) -> None:
        """Raise UserError for a weight that nobody has read; known: regular expressions of names that need not be."""
        if rest := self._rest(known):
            raise UserError(
                f"{self.path}: has the weights {rest}, for which this model has no place: it is of another architecture"
            )

    def tell_rest(self, *known: str) -> None:
        """Warn of weights that nobody has read, such as other heads; known as refuse_rest() takes it."""
        if rest := self._rest(known):
            message = f"{self.path}: left out the weights {rest}, for which this model has no place"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def refuse_other_copies(self, copies: Mapping[str, str]) -> None:
        """Raise UserError where a weight that is tied to another one, name -> that one's, has other numbers."""
        for name, origin in copies.items():
            if name in self and origin in self and not torch.equal(self[name], self[origin]):
                raise UserError(
                    f"{self.path}: {name} has other numbers than {origin}, though its configuration ties them: copy "
                    "both from one model"
                )

    def _rest(self, known: tuple[str, ...]) -> str:
        rest = [name for name in self if name not in self._read and not any(re.fullmatch(each, name) for each in known)]
        return f"{rest[0]} and {counted(len(rest) - 1, 'other')}" if len(rest) > 1 else "".join(rest)

    def ours(
        self, parameters: Iterable[Parameter], shapes: Mapping[str, torch.Size] | None = None
    ) -> dict[str, Tensor]:
        """These parameters by our names; UserError for one of another shape than the one that shapes has."""
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
        """Parts one below the other; UserError for those of other shapes."""
        parts = [self[name] for name in names]
        for name, part in zip(names, parts):
            if not part.dim() or part.shape[1:] != parts[0].shape[1:]:
                raise UserError(
                    f"{self.path}: {name} is {tuple(part.shape)}, and {names[0]} {tuple(parts[0].shape)}: they do not "
                    "fit each other"
                )
        return torch.cat(parts)


def renamed(weights: Mapping[str, Tensor], new_name: Callable[[str], str], path: Path) -> dict[str, Tensor]:
    """Weights by new names; UserError, which names path, where two would have the same."""
    old: dict[str, str] = {}
    for name in weights:
        if (new := new_name(name)) in old:
            raise UserError(f"{path}: has {old[new]} and {name}, two names of one weight: it is of several models")
        old[new] = name
    return {new: weights[name] for new, name in old.items()}


def theirs(weights: Mapping[str, Tensor], parameters: Iterable[Parameter]) -> dict[str, Tensor]:
    """These parameters of ours by another system's names."""
    result: dict[str, Tensor] = {}
    for ours, names in parameters:
        third = len(weights[ours]) // 3  # queries, keys and values are joined, or all but the queries
        parts = weights[ours].tensor_split([third * number for number in range(1, len(names))])
        result |= dict(zip(names, parts))
    return result


def parameters(
    table: Table, ours: str = "", theirs: str = "", kinds: tuple[str, ...] = ("weight", "bias")
) -> Iterator[Parameter]:
    """The parameters of a table's modules; ours, theirs: what comes before their names."""
    for module, names in table.items():
        separator = "_" if module.endswith("in_proj") else "."
        for kind in kinds:
            parts = (names,) if isinstance(names, str) else names
            yield Parameter(f"{ours}{module}{separator}{kind}", tuple(f"{theirs}{part}.{kind}" for part in parts))


class EncoderDecoderNames(NamedTuple):
    """Names of the parts of an encoder-decoder Transformer's layers in another system."""

    encoder: Table
    decoder: Table
    layer: str
    """A layer of a side, with its number to be put in."""

    def parameters(self, config: TransformerConfig, prefix: str = "") -> Iterator[Parameter]:
        """The parameters of all layers and final norms, without embeddings and output; prefix: before all of their
        names."""
        for side, layers, table in (
            ("encoder", config.encoder_layers, self.encoder),
            ("decoder", config.decoder_layers, self.decoder),
        ):
            for number in range(layers):
                layer = f"{prefix}{side}.{self.layer.format(number)}."
                yield from parameters(table, f"{side}.layers.{number}.", layer)
            if config.final_norm:
                yield from parameters({"norm": "layer_norm"}, f"{side}.", f"{prefix}{side}.")
