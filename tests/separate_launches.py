"""Models that merge no launches, beside those that do: their gradients agree up to the rounding of sums."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fasttfm.blocks import attention, feed_forward, merging, residual


@contextmanager
def separate_launches() -> Iterator[None]:
    """Models read every parameter by itself inside the block, as they do where there are no kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for block in (feed_forward, merging, residual):
            patch.setattr(block, "norm_adds_bias", lambda x: False)
        patch.setattr(attention, "attention_bias_parts", lambda *sizes: None)
        yield
