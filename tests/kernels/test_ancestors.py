"""attention/ancestors.py in the interpreter against plain PyTorch: positions, tiles, invalid places."""

import pytest
import torch
from accuracy import assert_as_accurate
from search_step import ROOM, a_step, attend, specified

from fasttfm.kernels.attention.decode import Decode
from fasttfm.kernels.tiles.table import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")


@pytest.mark.parametrize(
    ("positions", "beam", "heads", "width", "tile"),
    [
        ([0], 1, 2, 8, None),
        ([1], 1, 1, 64, None),
        ([ROOM - 1, 0, 17], 3, 2, 8, Tile(0, 16, 1)),
        ([15, 16, 1], 4, 2, 80, Tile(0, 16, 4)),
        ([31, 32, 33], 3, 1, 64, Tile(0, 32, 4)),
        ([5, ROOM - 1], 4, 3, 256, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_new_token_attends_its_ancestors_and_itself(positions, beam, heads, width, tile, dtype):
    step = a_step(positions, beam, heads, width, dtype)
    output, written = attend(*step, heads=heads, tile=tile)
    exact, expected = specified(*step, heads=heads)
    assert_as_accurate(output, specified(*step, heads=heads, precision=dtype)[0], exact)
    assert torch.equal(written.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_scores_far_from_0_and_from_the_new_one(offset):
    joint, cache, *places = a_step([33], beam=2)
    joint[:, :16], cache[:, :16] = 4.0, cache[:, :16] + offset
    output, _ = attend(joint, cache, *places)
    plain, exact = (specified(joint, cache, *places, precision=p)[0] for p in (torch.float32, torch.float64))
    assert_as_accurate(output, plain, exact)


@pytest.mark.parametrize("place", [-1, 3 * ROOM, 1 << 40, -(1 << 63), (1 << 32) + 5])
def test_an_invalid_place_is_no_key(place):
    step = a_step([20])
    step[2][:, 7] = place
    torch.testing.assert_close(attend(*step)[0], specified(*step, precision=torch.float32)[0])


@pytest.mark.parametrize("position", [-1, ROOM, (1 << 40) + 5, -(1 << 40) + 5, -(1 << 63)])
def test_nothing_is_stored_at_an_invalid_position(position):
    joint, cache, ancestors, positions = a_step([5, 5, 9])
    positions[1] = position
    output, written = attend(joint, cache.nan_to_num(), ancestors, positions)
    expected = cache.nan_to_num()
    for r in (0, 1, 2, 6, 7, 8):
        expected[r * ROOM + int(positions[r // 3])] = joint[r, 16:]
    assert torch.equal(written, expected)
    if position < 0:
        assert torch.equal(output[3:6], joint[3:6, 32:])  # without a past: the new value


@pytest.mark.parametrize("shares", [1, 3])
def test_cross_attention_of_a_search_writes_into_given_memory(shares):
    """Decode with one page of keys per sentence, an unused page, and queries strided like a projection's output."""
    slots, beam, heads, width, sources = 3, 4, 2, 24, 37
    keys, values = torch.randn(2, slots + 1, heads, sources, width)
    joint, table, lengths = torch.randn(slots * beam, heads * width), torch.tensor([[2], [0], [3]]), [37, 1, 20]
    query = joint.view(slots, beam, heads, width).transpose(1, 2)
    output = torch.full((slots * beam, heads * width), torch.nan)
    into = output.view(slots, beam, heads, width).transpose(1, 2)
    decode = Decode(query, keys, values, table, left=None, right=None, scale=0.3, shares=shares)
    assert decode(query, keys, values, torch.tensor(lengths), None, table, output=into) is into
    for slot, (page, length) in enumerate(zip([2, 0, 3], lengths)):
        scores = 0.3 * query[slot] @ keys[page, :, :length].transpose(1, 2)
        expected = scores.softmax(-1) @ values[page, :, :length]  # (H, K, D)
        torch.testing.assert_close(output.view(slots, beam, heads, width)[slot].transpose(0, 1), expected)
