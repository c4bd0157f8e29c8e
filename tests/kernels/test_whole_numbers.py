"""An integer that does not fit a kernel's 32 bits is refused in one line that names it."""

import pytest
import torch

from fasttfm.functional.attention.call import by_head
from fasttfm.kernels import cross_entropy, embedding, residual_add
from fasttfm.kernels.attention import forward, once, short
from fasttfm.kernels.jit import LARGEST
from fasttfm.kernels.parameter import Shape, kinds_of
from fasttfm.kernels.philox import dropout_arguments
from fasttfm.kernels.tiles.attention import Tile

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


@pytest.mark.parametrize(
    ("kernel", "file", "table"), [("flash", forward, "FORWARD"), ("short", short, "SHORT_FORWARD")]
)
def test_a_packed_length_beyond_32_bits_is_refused_by_name(kernel, file, table, monkeypatch):
    x, starts = by_head(torch.randn(4, 1, 8), 1), torch.tensor([0, 4])
    monkeypatch.setattr(file, table, lambda *size: Tile(16, 16, 4))
    with pytest.raises(ValueError, match=r"S is 2,147,483,648"):
        once.forward(kernel, x, x, x, packed=(starts, starts, 4, LARGEST + 1))


def test_rows_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"residual_add: M is 2,147,483,648; .* at most 2,147,483,647"):
        residual_add._add_dropped[(1,)](X, X, X, NO_DROPOUT, Shape(LARGEST + 1, 16), ROWS=1, COLUMNS=16)


def test_a_kernel_with_evaluated_annotations_is_refused():
    def kernel(x: Shape): ...

    with pytest.raises(TypeError, match=r"test_whole_numbers: .* needs `from __future__ import annotations`"):
        kinds_of(kernel)
