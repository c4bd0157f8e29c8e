"""An integer that does not fit a kernel's 32 bits is refused in one line that names it."""

import pytest
import torch

from fasttfm.kernels import cross_entropy, embedding, residual_add
from fasttfm.kernels.attention import once
from fasttfm.kernels.jit import LARGEST
from fasttfm.kernels.parameter import Shape
from fasttfm.kernels.philox import dropout_arguments

SEED = torch.tensor([1])
NO_DROPOUT = dropout_arguments(0.0, None, 0)
X, W, HEADS = torch.randn(3, 16), torch.randn(16, 16), torch.randn(1, 1, 4, 8)
TOKENS = torch.tensor([[1, 2, 3]])
EMBED = TOKENS, W, None
LOSS = cross_entropy.Forward
ADD = residual_add.Add(X.shape, X.device, 0.1)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("site", lambda n: ADD(X, X, X.clone(), SEED, n)),
        ("site", lambda n: once.forward("flash", *3 * [HEADS], dropout_p=0.1, seed=SEED, site=n)),
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
