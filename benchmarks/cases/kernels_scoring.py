"""Causal attention with a window, a soft cap, ALiBi slopes or sinks.

SDPA takes a window and ALiBi as a full mask, and has no cap and no sinks; FlexAttention compiles each form.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnF
from torch import Tensor

from benchmarks.cases.kernels_attention import flash_attn, flex, projected
from benchmarks.cases.operators import case
from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import Absent, Provider
from fasttfm import functional as F
from fasttfm.kernels.proof.costs import Cost

FORMS = ("window", "softcap", "alibi", "sinks")
_CAP = 50.0
"""Gemma 2's."""


def scored(form: str, B: int, H: int, L: int, D: int, passes: str, setting: Setting, *, compile: bool) -> Case:
    """Case of one of FORMS with q, k and v (B, H, L, D); the window is an eighth of the keys."""
    device, dtype = setting.device, setting.dtype
    window = max(1, L // 8) if form == "window" else L

    def make() -> Work:
        slopes = 2.0 ** (-8.0 * torch.arange(1, H + 1, device=device) / H)  # Press et al. 2022
        sinks = torch.linspace(-1, 1, H, device=device, dtype=dtype)
        past = torch.arange(L, device=device) - torch.arange(L, device=device)[:, None]
        hidden = (past > 0) | (past <= -window)
        forms: dict[str, dict[str, Any]] = {
            "window": {"window": (window - 1, None)},
            "softcap": {"softcap": _CAP},
            "alibi": {"alibi_slopes": slopes},
            "sinks": {"sinks": sinks},
        }
        options = forms[form]

        def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-2, -1) * D**-0.5
            if form == "softcap":
                scores = _CAP * torch.tanh(scores / _CAP)
            if form == "alibi":
                scores = scores - (slopes[:, None, None] * past.abs()).to(dtype)
            scores = scores.masked_fill(hidden, float("-inf"))
            if form == "sinks":
                scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(B, -1, L, 1)], -1)
            return torch.softmax(scores, -1)[..., :L] @ v

        def sdpa() -> Provider:
            if form in ("softcap", "sinks"):
                return peers.refusing(f"scaled_dot_product_attention has no {form}")
            mask = ~hidden
            if form == "alibi":
                mask = (-slopes[:, None, None] * past.abs()).masked_fill(hidden, float("-inf")).to(dtype)
            return partial(nnF.scaled_dot_product_attention, attn_mask=mask)

        def flash() -> Provider:
            if form == "sinks":
                return peers.refusing("flash_attn_func has no sinks")
            return flash_attn(causal=True, **({"window_size": (window - 1, 0)} if form == "window" else options))

        providers: dict[str, Provider | Absent] = {
            peers.OURS: partial(F.attention, causal=True, **options),
            peers.EAGER: eager,
            peers.SDPA: sdpa(),
            **({peers.FLEX: _flex(form, window, slopes, sinks, L)} if compile else {}),
            peers.FLASH_ATTN: peers.provider(peers.FLASH_ATTN, device, flash),
        }
        return Work(inputs=lambda i: projected(setting, B, L, H, D), providers=providers, reference=eager)

    pairs = sum(min(i + 1, window) for i in range(L))
    size = dtype.itemsize * D
    cost = (
        Cost(4 * B * H * pairs * D, B * H * L * (4 * size + 4)),
        Cost(10 * B * H * pairs * D, B * H * L * (7 * size + 4)),
    )
    shape = {"B": B, "H": H, "L": L, "D": D, "form": form, "window": window}
    return case("scored attention", shape, passes, setting, cost, make)


def _flex(form: str, window: int, slopes: Tensor, sinks: Tensor, L: int) -> Provider:
    def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _CAP * torch.tanh(score / _CAP) if form == "softcap" else score - slopes[h] * (query - key)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    function = flex(slopes.device, seen, (None, L, L), score_mod=score if form in ("softcap", "alibi") else None)
    if form != "sinks":
        return function

    def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, lse = function(q, k, v, return_lse=True)
        return output * torch.sigmoid(lse - sinks[:, None])[..., None].to(output.dtype)

    return with_sinks
