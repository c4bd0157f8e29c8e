"""The time that a kernel, a training step and a step of translation cannot beat, device by device.

    python -m benchmarks roofline                             every device: a step of paper-base and what bounds it
    python -m benchmarks roofline --device H200               kernels, step and decoding on one device

A floor is the longer of bytes over bandwidth and FLOPs over the product rate; launches come on top and are named apart.
Rates are the vendors' (benchmarks/limits/devices.py). What was measured stands beside the rates of its own machine in
every row of the report.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.limits import roofline_decode, roofline_step
from benchmarks.limits.devices import DEVICES, H200_SUSTAINED, Device
from benchmarks.limits.roofline_step import LENGTH, MODELS
from benchmarks.measure.text_table import aligned
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost, Machine, Shape


def kernels(shape: Shape, *, tokens: int, length: int, size: int) -> dict[str, Cost]:
    """The kernels of a model at as many tokens of each side, forward and backward apart."""
    d, hidden, vocabulary = shape.d_model, shape.d_ff, shape.vocabulary
    heads = (tokens // length, shape.heads, length, length, d // shape.heads, size)
    return {
        "attention, forward": costs.attention(*heads, causal=False, dropout=False),
        "attention, backward": costs.attention_backward_short(*heads, causal=False, dropout=False),
        "residual + dropout + LayerNorm, forward": costs.residual_layer_norm(tokens, d, size, dropout=True),
        "residual + dropout + LayerNorm, backward": costs.residual_layer_norm_backward(
            tokens, d, size, stream=False, dropout=True
        ),
        "LayerNorm, forward": costs.layer_norm(tokens, d, size),
        "feed-forward, forward": costs.linear(tokens, d, hidden, size) + costs.linear(tokens, hidden, d, size),
        "feed-forward, backward": costs.linear_backward(tokens, d, hidden, size, bias=False)
        + costs.linear_backward(tokens, hidden, d, size, bias=True),
        "logits, forward": costs.linear(tokens, d, vocabulary, size),
        "logits, backward": costs.linear_backward(tokens, d, vocabulary, size, bias=False),
        "cross entropy with its gradient": costs.cross_entropy(tokens, vocabulary, size),
        "embedding, forward": costs.embedding(tokens, d, size, dropout=True),
        "embedding, backward": costs.embedding_backward(tokens, d, vocabulary, size, dropout=True),
        "Adam": costs.adam(costs.parameters(shape)),
    }


def every_device(model: str, tokens: int) -> str:
    """One line a device: the step's floor and the throughput that it allows."""
    shape, rows = MODELS[model], []
    useful = roofline_step.model_flops(shape, tokens=tokens)
    for device in (*DEVICES.values(), H200_SUSTAINED):
        machine = device.machine("bfloat16")
        parts = roofline_step.total(roofline_step.step(shape, machine, tokens=tokens))
        rows.append(
            (
                device.name,
                device.chip,
                f"{device.half:,.0f}",
                f"{device.bandwidth:,.0f}",
                f"{parts.fused:,.1f}",
                f"{parts.products / parts.fused:.0%}",
                f"{1e3 * tokens / parts.fused:,.0f}",
                f"{1e3 * useful / parts.fused / machine.flops:.0%}",
            )
        )
    head = ("device", "chip", "TFLOP/s", "GB/s", "step floor ms", "of it products", "target tokens/s", "MFU there")
    return (
        f"A fused training step of {model}, {tokens:,} source and target tokens, no padding, half precision: "
        f"{useful / 1e12:.2f} TFLOP.\nFloors from the vendors' rates: computed, not measured.\n\n"
        + aligned([head, *rows], names=2)
    )


def one_device(device: Device, model: str, tokens: int) -> str:
    """Kernels, step and decoding of one device."""
    shape, machine = MODELS[model], device.machine("bfloat16")
    rows = []
    for name, cost in kernels(shape, tokens=tokens, length=LENGTH, size=2).items():
        rows.append(
            (
                name,
                f"{cost.flops / 1e9:,.1f}",
                f"{cost.bytes / 1e6:,.1f}",
                str(cost.launches),
                f"{1e6 * cost.seconds(machine):,.1f}",
                cost.bound(machine),
            )
        )
    return "\n\n".join(
        (
            f"{device.name} ({device.chip}): {device.half:,.0f} TFLOP/s of half-precision products, "
            f"{device.bandwidth:,.0f} GB/s.\nSource: {device.source}.\nFloors are computed, not measured.",
            f"Kernels of {model} at {tokens:,} tokens, sentences of {LENGTH}, half precision\n"
            + aligned([("kernel", "GFLOP", "MB", "launches", "floor us", "bound by"), *rows]),
            _step_text(shape, machine, model, tokens),
            _decoding_text(shape, machine, model),
        )
    )


def _step_text(shape: Shape, machine: Machine, model: str, tokens: int) -> str:
    parts = roofline_step.step(shape, machine, tokens=tokens)
    whole = roofline_step.total(parts)
    useful = roofline_step.model_flops(shape, tokens=tokens)
    launches = roofline_step.cost(shape, tokens=tokens).launches
    head = ("floor ms", "eager", "compile + SDPA + fused Adam", "fused", "of which products")
    return (
        f"A training step of {model}, {tokens:,} source and target tokens, no padding, half precision\n"
        + aligned([head, *roofline_step.cells(parts)])
        + f"\n{useful / 1e12:.2f} TFLOP, {useful / tokens / 1e9:.3f} GFLOP a target token; at the fused floor "
        f"{1e3 * tokens / whole.fused:,.0f} target tokens/s, {1e3 * useful / whole.fused / machine.flops:.0%} of the\n"
        f"product rate. {launches} launches: {roofline_decode.GRAPH_LAUNCH_US * launches / 1e3:.1f} ms more in a "
        "captured graph if none overlaps."
    )


def _decoding_text(shape: Shape, machine: Machine, model: str) -> str:
    rows = []
    for batch in (1, 8, 32, 128):
        step = roofline_decode.decoding_step(shape, machine, batch=batch)
        parts = (
            step.weights,
            step.products,
            step.self_cache,
            step.cross_cache,
            step.search,
            step.device_us,
            step.step_us(),
        )
        worse = (step.cross_cache_copied, step.reorder, step.search_eager)
        rows.append(
            (str(batch), *(f"{us:,.1f}" for us in parts), f"{step.launch_share:.0%}", *(f"{us:,.1f}" for us in worse))
        )
    head = [
        *("batch", "weights", "products", "self K/V", "cross K/V", "search", "floor", "with launches", "launching"),
        *("cross copied", "reorder", "search eager"),
    ]
    step = roofline_decode.decoding_step(shape, machine, batch=1)
    return (
        f"One step of translation with {model}, beam 4, position 14, sources of 27 tokens, half precision; us\n"
        + aligned([head, *rows], names=0)
        + f"\n{step.launches_joined} launches with residual and LayerNorm in the products' epilogues, {step.launches} "
        f"without; {roofline_decode.GRAPH_LAUNCH_US} us each in a replayed graph, assumed.\nThe last three columns: "
        "what copying instead of sharing and indexing, and search operator by operator, take in the place of theirs."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks roofline", description="Times that a device cannot beat.")
    parser.add_argument("--device", help=f"one of {', '.join(DEVICES)} (default: all)")
    parser.add_argument("--model", choices=MODELS, default="paper-base")
    parser.add_argument("--tokens", type=int, default=25_000, help="of each side in a batch (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.tokens < LENGTH:
        raise UserError(f"--tokens {args.tokens}: at least one sentence of {LENGTH}")
    known = {device.name.lower(): device for device in (*DEVICES.values(), H200_SUSTAINED)}
    if args.device is None:
        print(every_device(args.model, args.tokens))
        return 0
    if args.device.lower() not in known:
        raise UserError(f"--device {args.device} is unknown: one of {', '.join(DEVICES)}")
    print(one_device(known[args.device.lower()], args.model, args.tokens))
    return 0
