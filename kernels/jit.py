"""triton.jit for kernels that are launched: the compiler options that every one of them takes, whatever Triton's
defaults become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton.runtime.jit import JITFunction

OPTIONS = {"enable_fp_fusion": True}
"""a * b + c may become one instruction. Triton 3.9 warns that 3.10 will not do that unless it is asked to: kernels
would then run with other instructions and other last bits than those that are tested and held against the budgets."""


class _Kernel(JITFunction):
    def _pack_args(self, backend: Any, kwargs: dict[str, Any], *others: Any) -> Any:
        # Runs when a launch must compile and only then: as an argument, the option would cost every launch 0.4 us,
        # because Triton looks a compiled kernel up by the text of all options.
        return super()._pack_args(backend, OPTIONS | kwargs, *others)


def kernel(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """As @triton.jit, for a function that is launched; what only kernels call takes @triton.jit itself."""
    if function is None:
        return lambda function: kernel(function, do_not_specialize=do_not_specialize)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, do_not_specialize=do_not_specialize)
    return _Kernel(function, do_not_specialize=do_not_specialize)
