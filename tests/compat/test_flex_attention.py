"""The table "From torch's FlexAttention" of docs/replace-torch-nn.md: each argument against its mod function."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fasttfm import functional as F

B, H, L, S, D = 2, 4, 5, 9, 8
OFFSET, LENGTHS, SLOPES = torch.tensor([4, 1]), torch.tensor([9, 3]), torch.rand(H)
BIAS, ALLOWED = torch.randn(H, L, S), torch.rand(B, H, L, S) > 0.3

MODS = {
    "causal": (lambda b, h, q, kv: q >= kv, {"causal": True}),
    "bottom right": (lambda b, h, q, kv: q + S - L >= kv, {"causal": "bottom_right"}),
    "offset": (lambda b, h, q, kv: q + OFFSET[b] >= kv, {"causal": True, "causal_offset": OFFSET}),
    "causal window": (lambda b, h, q, kv: (q >= kv) & (q - kv <= 2), {"causal": True, "window": (2, None)}),
    "window": (lambda b, h, q, kv: (q - kv).abs() <= 2, {"window": (2, 2)}),
    "lengths": (lambda b, h, q, kv: kv < LENGTHS[b], {"key_lengths": LENGTHS}),
    "mask": (lambda b, h, q, kv: ALLOWED[b, h, q, kv], {"mask": ALLOWED}),
    "bias": (lambda score, b, h, q, kv: score + BIAS[h, q, kv], {"mask": BIAS}),
    "soft cap": (lambda score, b, h, q, kv: 0.5 * torch.tanh(score / 0.5), {"softcap": 0.5}),
    "slopes": (lambda score, b, h, q, kv: score - SLOPES[h] * (q - kv).abs(), {"alibi_slopes": SLOPES}),
}
"""A mask_mod, or a score_mod."""


def operands(heads=H):
    return [torch.randn(B, h, n, D) for h, n in ((H, L), (heads, S), (heads, S))]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MODS)
def test_mods(name):
    mod, options = MODS[name]
    tensors = operands(heads=2)
    if mod.__code__.co_argcount == 5:
        given = {"score_mod": mod}
    else:
        given = {"block_mask": create_block_mask(mod, B, H, L, S, device="cpu")}
    torch.testing.assert_close(F.attention(*tensors, **options), flex_attention(*tensors, enable_gqa=True, **given))
