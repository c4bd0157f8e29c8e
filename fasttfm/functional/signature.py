"""Error messages for wrong argument types, from a function's annotations.

Arguments are checked only after a call has failed, so a successful call pays for one more Python frame. Arguments
whose wrong type would go unnoticed are checked where they are read: numbers and tensors in the operators (record.py),
flags by is_flag().
"""

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import torch
from torch import Tensor

from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional.record import TYPES, shown
from fasttfm.functional.subclasses import PLAIN_TENSORS, instead, unread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_compiling = torch.compiler.is_dynamo_compiling


@overload
def names_arguments(function: Callable[Arguments, Result], /) -> Callable[Arguments, Result]: ...


@overload
def names_arguments(**outer: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]: ...


def names_arguments(function: Any = None, /, **outer: str) -> Any:
    """Decorator: a call that fails because of an argument's type raises an ArgumentTypeError that names the argument.

    outer: of a function that forwards its arguments under other names, its own name of each by the other; then all
    TypeErrors and ValueErrors use its own. Other errors, and errors while torch.compile traces, pass unchanged.
    """
    if function is None:
        return functools.partial(names_arguments, **outer)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as failed:
            refused = isinstance(failed, NotImplementedError) or "NotImplemented" in str(failed)
            error = None if _compiling() else wrong_argument(function, args, kwargs, refused)
            if error is None and outer and not _compiling() and isinstance(failed, TypeError | ValueError):
                error = renamed(failed, outer)
            if error is None:
                raise
        raise error

    return call


def checks_arguments(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator that checks the types of the arguments before each call; for constructors and other rare calls."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not _compiling() and (error := wrong_argument(function, args, kwargs)) is not None:
            raise error
        return function(*args, **kwargs)

    return call


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """A copy of the error with the argument names of the outer function; names: outer by inner."""
    words = re.compile(r"\b(" + "|".join(names) + r")\b")
    return type(error)(words.sub(lambda word: names[word[0]], str(error)))


def is_flag(name: str, value: Any) -> None:
    """Raise ArgumentTypeError unless value is True or False."""
    if value is not True and value is not False:
        raise ArgumentTypeError(f"{name} is {shown(value)}: True or False is needed")


def wrong_argument(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], refused: bool = False
) -> Exception | None:
    """The error for the first argument whose type contradicts the annotation; None if there is none.

    None also for a call that does not fit the signature: Python raises its own error. refused: a tensor subclass did
    not compute the operator. Modules leave subclasses that operators cannot read to torch.nn.
    """
    signature, kinds = _annotations(function)
    is_method = "self" in signature.parameters
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    for name in [name for name in bound if name in kinds]:
        value, what = bound[name], f"{type(args[0]).__name__ if is_method else function.__name__}: {name}"
        if not any(_is_one(value, kind) for kind in kinds[name]):
            words = " or ".join(_words(kind) for kind in sorted(kinds[name], key=lambda kind: kind is type(None)))
            return ArgumentTypeError(f"{what} is {shown(value)}: {instead(value) or f'{words} is needed'}")
        plain = type(value) in PLAIN_TENSORS
        if isinstance(value, Tensor) and (plain or not is_method) and (reason := unread(value, refused)):
            return (ArgumentError if plain else ArgumentTypeError)(f"{what} {reason}")
    return None


@functools.cache
def _annotations(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, tuple[Any, ...]]]:
    """The signature, and the types allowed for each annotated argument."""
    hints = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    unions = (Union, types.UnionType)
    kinds = {name: get_args(hint) if get_origin(hint) in unions else (hint,) for name, hint in hints.items()}
    return inspect.signature(function), kinds


def _is_one(value: Any, kind: Any) -> bool:
    if kind in TYPES:
        return isinstance(value, TYPES[kind].classes)
    if kind is torch.device:  # or the index of a GPU
        return isinstance(value, torch.device | int)
    origin = get_origin(kind) or kind
    return kind is Any or not isinstance(origin, type) or isinstance(value, origin)


def _words(kind: Any) -> str:
    if kind in TYPES:
        return TYPES[kind].words
    origin = get_origin(kind) or kind
    if origin is Callable or origin is types.FunctionType:
        return "a callable"
    return {type(None): "None", tuple: "a tuple"}.get(origin, getattr(origin, "__name__", str(origin)))
