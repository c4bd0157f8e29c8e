"""What the modules raise for arguments that cannot be used."""

from __future__ import annotations


class ArgumentError(ValueError, AssertionError, RuntimeError):
    """A value or a shape that a module cannot take.

    torch.nn raises AssertionError in one place and RuntimeError in the next; this is both, and the ValueError that it
    should have been, so that code written for torch.nn keeps catching it.
    """


class ArgumentTypeError(TypeError, AssertionError, RuntimeError):
    """A dtype that a module cannot take; also what torch.nn raises for it."""


def check_dropout(dropout: float) -> None:
    """Raises ArgumentError unless dropout is a probability."""
    if not 0.0 <= dropout <= 1.0:
        raise ArgumentError(f"dropout is {dropout} but must be a probability in [0, 1]")


def check_layer(d_model: int, nhead: int, dropout: float) -> None:
    """Raises ArgumentError unless an encoder or decoder layer can be built of these."""
    check_dropout(dropout)
    if d_model <= 0 or nhead <= 0 or d_model % nhead:
        raise ArgumentError(f"d_model {d_model} must be divisible by nhead {nhead}, and both greater than 0")
