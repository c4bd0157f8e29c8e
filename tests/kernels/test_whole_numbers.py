"""An integer that does not fit a kernel's 32 bits is refused in one line that names it."""

import pytest
import torch

from fasttfm.kernels import cross_entropy, embedding, feed_forward, layer_norm, residual_add
from fasttfm.kernels.jit import LARGEST
from fasttfm.kernels.parameter import Shape, kinds_of
from fasttfm.kernels.philox import dropout_arguments

SEED = torch.tensor([1])
NO_DROPOUT = dropout_arguments(0.0, None, 0)
X, W = torch.randn(3, 16), torch.randn(16, 16)
TOKENS = torch.tensor([[1, 2, 3]])
NORM = layer_norm.Forward(X, X, dropout_p=0.1)
EMBED = TOKENS, W, None
LOSS = cross_entropy.Forward
ADD = residual_add.Add(X.shape, X.device, 0.1)
NETWORK = feed_forward.Forward(X, W, W, dropout_p=0.1, route="fused")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("site", lambda n: ADD(X, X, X.clone(), SEED, n)),
        ("site", lambda n: NORM(X, X, None, None, None, 1e-5, SEED, n)),
        ("site", lambda n: NETWORK(X, W, None, W, None, SEED, n)),
        ("site", lambda n: embedding.Forward(*EMBED, dropout_p=0.1)(*EMBED, SEED, n)),
        ("pad_id", lambda n: embedding.Forward(*EMBED, pad_id=n)(*EMBED)),
        ("ignore_index", lambda n: LOSS(X, TOKENS[0], label_smoothing=0.0, ignore_index=n)(X, TOKENS[0])),
    ],
)
@pytest.mark.parametrize("number", [LARGEST + 1, -LARGEST - 2])
def test_an_integer_beyond_32_bits_is_refused_by_name(name, call, number):
    with pytest.raises(ValueError, match=f"{name} is {number:,}; kernels take 32-bit integers") as raised:
        call(number)
    assert "\n" not in str(raised.value)
    call(LARGEST)


def test_rows_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"residual_add: M is 2,147,483,648; .* at most 2,147,483,647"):
        residual_add._add_dropped[(1,)](X, X, X, NO_DROPOUT, Shape(LARGEST + 1, 16), ROWS=1, COLUMNS=16)


def test_a_kernel_with_evaluated_annotations_is_refused():
    def kernel(x: Shape): ...

    with pytest.raises(TypeError, match=r"test_whole_numbers: .* needs `from __future__ import annotations`"):
        kinds_of(kernel)
