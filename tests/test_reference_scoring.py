"""reference.attention() in float64 against transformers: Gemma 2's soft caps, gpt-oss' sinks, Mistral's windows, ALiBi
of MPT.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

from fasttfm import reference

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")


def modeling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


masking = importlib.import_module("transformers.masking_utils")
gemma2, gpt_oss, mistral = (modeling(name).eager_attention_forward for name in ("gemma2", "gpt_oss", "mistral"))
modeling_mpt = modeling("mpt")

B, H, HK, L, D = 2, 6, 2, 11, 8
NEAR = {"atol": 1e-6, "rtol": 1e-6}
"""Most of the models compute the softmax in float32."""


def operands():
    return [torch.randn(B, h, L, D, dtype=torch.float64) for h in (H, HK, HK)]


def mask_of(function=masking.causal_mask_function, lengths=(L, 7)):
    """The additive mask of transformers' eager models, for rows of these lengths."""
    padding = torch.arange(L) < torch.tensor(lengths)[:, None]
    return masking.eager_mask(
        batch_size=B, q_length=L, kv_length=L, mask_function=function, attention_mask=padding, dtype=torch.float64
    )


def module(**fields):
    return SimpleNamespace(head_dim=D, num_key_value_groups=H // HK, training=False, **fields)


@pytest.mark.parametrize("window", [None, 1, 4, 99])
@pytest.mark.parametrize("softcap", [None, 0.7, 50.0])
def test_gemma_2(window, softcap):
    q, k, v = operands()
    function = masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)
    expected, weights = gemma2(module(), 3 * q, k, v, mask_of(function), scaling=0.4, softcap=softcap)
    window = None if window is None else (window - 1, None)  # their window includes the query's own key
    options = {"causal": True, "window": window, "softcap": softcap or 0.0, "key_lengths": torch.tensor([L, 7])}
    output, ours = reference.attention(3 * q, k, v, scale=0.4, **options)
    torch.testing.assert_close(output.transpose(1, 2)[0], expected[0], **NEAR)
    torch.testing.assert_close(output.transpose(1, 2)[1, :7], expected[1, :7], **NEAR)  # later queries see padding
    torch.testing.assert_close(ours[0], weights[0], **NEAR)


@pytest.mark.parametrize("window", [None, 3])
def test_gpt_oss(window):
    q, k, v = operands()
    sinks = torch.randn(H, dtype=torch.float64)
    function = masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)
    expected, weights = gpt_oss(module(sinks=sinks), q, k, v, mask_of(function, (L, L)), scaling=D**-0.5)
    looks = {"causal": True, "window": None if window is None else (window - 1, None), "sinks": sinks}
    output, ours = reference.attention(q, k, v, **looks)
    torch.testing.assert_close(output.transpose(1, 2), expected)  # all in float64
    torch.testing.assert_close(ours, weights)


def test_mistral_and_windows_to_both_sides():
    q, k, v = operands()
    causal = mask_of(masking.sliding_window_causal_mask_function(5), (L, L))
    both = mask_of(masking.sliding_window_bidirectional_mask_function(3), (L, L))
    for mask, looks in ((causal, {"causal": True, "window": (4, None)}), (both, {"window": (3, 3)})):
        expected, _ = mistral(module(), q, k, v, mask, scaling=D**-0.5)
        torch.testing.assert_close(reference.attention(q, k, v, **looks)[0].transpose(1, 2), expected, **NEAR)


def test_mpt():
    attention = (
        modeling_mpt.MptAttention(transformers.MptConfig(d_model=H * D, n_heads=H, max_seq_len=L)).double().eval()
    )
    attention.attn_dropout_p = 0.0
    x = torch.randn(B, L, H * D, dtype=torch.float64)
    alibi = modeling_mpt.build_mpt_alibi_tensor(H, L).double()  # (H, 1, L)
    expected, weights = attention(x, alibi, attention_mask=torch.ones(L, L, dtype=torch.bool).triu(1))
    q, k, v = (part.unflatten(2, (H, D)).transpose(1, 2) for part in attention.Wqkv(x).chunk(3, dim=2))
    slopes = alibi[:, 0, -1] - alibi[:, 0, -2]
    output, ours = reference.attention(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(ours, weights, **NEAR)
    torch.testing.assert_close(attention.out_proj(output.transpose(1, 2).flatten(2)), expected, **NEAR)
