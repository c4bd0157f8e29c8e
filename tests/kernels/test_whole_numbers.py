"""A whole number that a kernel cannot take is refused in a line that names it."""

import pytest
import torch

from fasttfm.kernels import cross_entropy, embedding, feed_forward, layer_norm, residual_add
from fasttfm.kernels.jit import LARGEST
from fasttfm.kernels.parameter import Shape, kinds_of
from fasttfm.kernels.philox import dropout_arguments

SEED = torch.tensor([1])
NO_DROPOUT = dropout_arguments(0.0, None, 0)
DROPPED = {"dropout_p": 0.1, "seed": SEED}
X, W = torch.randn(3, 16), torch.randn(16, 16)
TOKENS = torch.tensor([[1, 2, 3]])
LOSS, NORM = cross_entropy.Forward, layer_norm.Forward(X, X, None, None, None, dropout_p=0.1)
TABLE = {"scale": 1.0, "first_position": 0, **DROPPED}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("site", lambda n: residual_add.residual_add(X, X, **DROPPED, site=n)),
        ("site", lambda n: NORM(X, X, None, None, None, 1e-5, SEED, n)),
        ("site", lambda n: feed_forward.feed_forward(X, W, None, W, None, **DROPPED, site=n, route="fused")),
        ("site", lambda n: embedding.forward(TOKENS, W, None, **TABLE, pad_id=None, site=n)),
        ("pad_id", lambda n: embedding.forward(TOKENS, W, None, **TABLE, pad_id=n, site=0)),
        ("ignore_index", lambda n: LOSS(X, TOKENS[0], label_smoothing=0.0, ignore_index=n)(X, TOKENS[0])),
    ],
)
@pytest.mark.parametrize("number", [LARGEST + 1, -LARGEST - 2])
def test_what_does_not_fit_32_bits_is_refused_by_name(name, call, number):
    with pytest.raises(ValueError, match=f"{name} is {number:,}, and a kernel takes 32-bit numbers") as said:
        call(number)
    assert "\n" not in str(said.value)
    call(LARGEST)


def test_rows_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"residual_add: M is 2,147,483,648, .* at most 2,147,483,647"):
        residual_add._add_dropped[(1,)](X, X, X, NO_DROPOUT, Shape(LARGEST + 1, 16), ROWS=1, COLUMNS=16)


def test_a_kernel_whose_annotations_python_has_read_is_refused():
    def kernel(x: Shape): ...

    with pytest.raises(TypeError, match=r"test_whole_numbers: .* needs `from __future__ import annotations`"):
        kinds_of(kernel)
