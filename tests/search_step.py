"""Inputs, kernel call and reference of a beam search step whose keys never move."""

import torch

from fasttfm.kernels.attention.ancestors import Ancestors

ROOM = 40


def a_step(positions, beam=3, heads=2, width=8, dtype=torch.float32, room=ROOM):
    """joint, cache, ancestors and positions of a step. Hypotheses share places, the past is anywhere in the rows of a
    slot, unused places of the cache are NaN, and unused ancestors are arbitrary, in range or not."""
    torch.manual_seed(3)
    rows, d = len(positions) * beam, heads * width
    row, t = torch.arange(rows)[:, None], torch.arange(room)
    ancestors = (row // beam * beam + torch.randint(beam, (rows, room))) * room + t
    past = t < torch.tensor(positions).repeat_interleave(beam)[:, None]
    cache = torch.full((rows * room, 2 * d), torch.nan)
    cache[ancestors[past]] = torch.randn(int(past.sum()), 2 * d)
    nonsense = torch.stack([torch.randint(rows * room, (rows, room)), torch.randint(-(1 << 62), 1 << 62, (rows, room))])
    ancestors[~past] = nonsense[(row + t) % 2, row, t][~past]
    return torch.randn(rows, 3 * d).to(dtype), cache.to(dtype), ancestors, torch.tensor(positions)


def attend(joint, cache, ancestors, positions, heads=2, scale=0.3, tile=None):
    """The output and the updated cache; asserts that the memory around both is unchanged."""
    d = joint.shape[1] // 3
    memories = [x.new_full((len(x) + 64, x.shape[1]), 7.0) for x in (cache, joint[:, :d])]
    written, out = (memory[32:-32] for memory in memories)
    written.copy_(cache)
    given = joint, written, ancestors, positions
    assert Ancestors(*given, heads=heads, scale=scale, tile=tile)(*given, out) is None
    assert all((memory[:32] == 7.0).all() and (memory[-32:] == 7.0).all() for memory in memories)
    return out, written


def specified(joint, cache, ancestors, positions, heads=2, scale=0.3, precision=torch.float64):
    """The reference of attend(), row by row; ignores ancestors out of range."""
    rows, room = ancestors.shape
    beam, expected = rows // len(positions), cache.clone()
    output = joint.new_empty(rows, joint.shape[1] // 3, dtype=precision)
    for r in range(rows):
        query, *new = joint[r].to(precision).view(3, heads, -1)  # (H, D)
        position = int(positions[r // beam])
        expected[r * room + position] = joint[r, joint.shape[1] // 3 :]
        places = ancestors[r, :position]
        past = cache[places[(places >= 0) & (places < len(cache))]].to(precision).view(-1, 2, *query.shape)
        key, value = torch.cat([past, torch.stack(new)[None]]).permute(1, 2, 0, 3)  # (H, keys, D)
        output[r] = torch.softmax(scale * query[:, None] @ key.transpose(1, 2), -1).matmul(value).flatten()
    return output, expected
