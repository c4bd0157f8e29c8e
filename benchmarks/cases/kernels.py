"""Group kernels: every fused operator in every form, with separate forward and backward.

On a GPU about 25,000 tokens per batch, as in training; on a CPU the same forms on fewer tokens. standard has every
form, quick leaves out most of torch.compile, full adds long rows and the big model's width, smoke has every form on a
few tokens.
"""

from benchmarks.cases.kernels_attention import Form, dense, packed, weights
from benchmarks.cases.kernels_rows import (
    cross_entropy,
    embedding,
    feed_forward,
    layer_norm,
    linear_cross_entropy,
    residual_layer_norm,
)
from benchmarks.cases.kernels_scoring import FORMS, scored
from benchmarks.measure.case import Case, Setting

PASSES = ("forward", "backward")


def _kept(passes: str, dropout: float) -> str:
    """Pass to time: with dropout, a forward that saves what backward needs, as in training."""
    return "training forward" if passes == "forward" and dropout else passes


def cases(setting: Setting) -> list[Case]:
    return [*_attention(setting), *_rows(setting)]


def _attention(setting: Setting) -> list[Case]:
    smoke, standard, full = setting.level == "smoke", setting.at_least("standard"), setting.level == "full"
    tokens = 48 if smoke else 25_000 if setting.on_gpu else 1_600 if standard else 800
    H, D = (2, 16) if smoke else (8, 64)
    short = (8, 12) if smoke else (27, 50, 100) if setting.on_gpu else (27, 100)
    result = []
    for passes in PASSES:
        for length in short:
            B = tokens // length
            for mask, dropout in (("lengths", 0.0), ("lengths+causal", 0.0), ("lengths", 0.1)):
                # quick compiles one form per length: compiled forms differ little
                compile = standard or (not smoke and mask == "lengths" and not dropout and length == short[-1])
                form = Form(B=B, H=H, L=length, S=length, D=D, mask=mask, dropout=dropout)
                result.append(dense(form, _kept(passes, dropout), setting, compile=compile))
        length, B = short[-1], tokens // short[-1]
        for mask in ("none", "bool", "additive"):
            form = Form(B=B, H=H, L=length, S=length, D=D, mask=mask)
            result.append(dense(form, passes, setting, compile=standard))
        cross = Form(B=B, H=H, L=length, S=length * 5 // 4, D=D, mask="lengths")
        result.append(dense(cross, passes, setting, compile=standard))
        for causal in (False, True):
            result.append(
                packed(B, length, H, D, passes, setting, causal=causal, compile=standard or (setting.on_gpu and causal))
            )
        result.append(weights(Form(B=B, H=H, L=length, S=length, D=D, mask="lengths"), passes, setting))
        for length in _long(setting):
            large = setting.on_gpu and not setting.small_memory
            B = max(1, (16_384 if large else 1024) // length)
            heads = 16 if large else H
            # on a CPU long rows compile for minutes; on a GPU they are where FlexAttention is best
            compile = (standard and not full) if not setting.on_gpu else standard or length == 4096
            for width, dropout in ((D, 0.0), (D, 0.1), (2 * D, 0.0), (2 * D, 0.1)) if large else ((D, 0.0),):
                form = Form(B=B, H=heads * D // width, L=length, S=length, D=width, mask="causal", dropout=dropout)
                one = compile and (standard or (width, dropout) == (D, 0.0))
                result.append(dense(form, _kept(passes, dropout), setting, compile=one))
            if length == _long(setting)[0]:
                result += [scored(each, B, heads, length, D, passes, setting, compile=compile) for each in FORMS]
    return result


def _long(setting: Setting) -> tuple[int, ...]:
    if setting.level == "smoke":
        return (32,)
    if setting.on_gpu:
        return (1024, 4096) if setting.level == "quick" else (1024, 2048, 4096)
    return {"quick": (1024,), "standard": (1024, 2048), "full": (1024, 2048, 4096)}[setting.level]


def _rows(setting: Setting) -> list[Case]:
    smoke, full = setting.level == "smoke", setting.level == "full"
    rows = 40 if smoke else 25_000 if setting.on_gpu else 1_600 if setting.at_least("standard") else 800
    length = 10 if smoke else 100
    widths = (16,) if smoke else (512, 1024) if setting.on_gpu or full else (512,)
    V = 50 if smoke else 37_000 if setting.on_gpu else 8_000
    # fewer rows as wide as a vocabulary, if time or memory is short
    few = rows if smoke or (setting.on_gpu and not setting.small_memory) else rows // 4
    result = []
    for N in widths:
        for passes in PASSES:
            result.append(layer_norm(rows, N, passes, setting))
            for dropout in (0.0, 0.1):
                result.append(residual_layer_norm(rows, N, dropout, _kept(passes, dropout), setting))
            for dropout in (0.0, 0.1):
                result.append(feed_forward(rows, N, dropout, _kept(passes, dropout), setting))
            result += [feed_forward(rows, N, 0.1, _kept(passes, 0.1), setting, each) for each in ("gelu", "silu")]
        result += [linear_cross_entropy(few, N, V, smoothing, setting) for smoothing in (0.1, 0.0)]
    for passes in PASSES:
        result.append(cross_entropy(few, V, passes, setting))
        if passes == "backward":  # and both in one, for providers that fuse them
            result.append(cross_entropy(few, V, "forward+backward", setting))
        result.append(embedding(rows // length, length, widths[0], V, 0.1, _kept(passes, 0.1), setting))
    return result
