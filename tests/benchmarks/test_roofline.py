"""The model of limits on cases that can be counted by hand, and against the plan's figures for one H200."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.limits import roofline, roofline_decode, roofline_step
from benchmarks.limits.devices import DEVICES, H200_SUSTAINED
from benchmarks.limits.roofline_step import MODELS
from fasttfm.errors import UserError
from fasttfm.kernels.compile_case import CHIPS
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import H200, Cost, Machine

BASE, BIG = MODELS["paper-base"], MODELS["paper-big"]


def test_a_tiny_product():
    cost = costs.linear(2, 3, 5, 4)  # (2, 3) times (5, 3) transposed, float32
    assert cost == Cost(flops=2 * 2 * 3 * 5, bytes=4 * (6 + 15 + 10), launches=1)
    by_products = Machine(flops=10, bandwidth=1000)
    assert (cost.seconds(by_products), cost.bound(by_products)) == (6, "products")
    by_memory = Machine(flops=60, bandwidth=31)
    assert (cost.seconds(by_memory), cost.bound(by_memory)) == (4, "memory")


def test_one_attention_of_two_tokens():
    # two queries, two keys, four channels: q, k, v and the output are 8 numbers each, a log-sum-exp a row
    full = costs.attention(1, 1, 2, 2, 4, 4, causal=False, dropout=False)
    assert full == Cost(flops=2 * (2 * 2 * 2 * 4), bytes=4 * (4 * 8 + 2), launches=1)
    causal = costs.attention(1, 1, 2, 2, 4, 4, causal=True, dropout=False)
    assert causal.flops == full.flops * 3 // 4  # the first query sees one key


@pytest.mark.parametrize(("shape", "per_token", "tflop"), [(BASE, 0.382, 9.55), (BIG, 1.292, 32.3)])
def test_model_flops_of_a_step(shape, per_token, tflop):
    flops = roofline_step.model_flops(shape, tokens=25_000)
    assert flops / 25_000 / 1e9 == pytest.approx(per_token, abs=0.0005)
    assert flops / 1e12 == pytest.approx(tflop, abs=0.05)


def test_model_flops_by_hand():
    tiny = costs.Shape(d_model=2, heads=1, d_ff=3, vocabulary=5, layers=1)
    # encoder 4*4 + 2*6, decoder 8*4 + 2*6, table 10: 82 weights, each 6 FLOPs a token
    # three attentions, two products of 2*length*d_model, three times with the backward pass
    assert roofline_step.model_flops(tiny, tokens=7, length=11) == 7 * (6 * 82 + 3 * 3 * 2 * 2 * 11 * 2)


PLAN = {
    # one H200 at 790 TFLOP/s and 4.3 TB/s, milliseconds: eager, compile + SDPA + fused Adam, fused; base, then big
    "logits and cross entropy": ((13.9, 5.8, 4.5), (17.5, 9.4, 8.1)),
    "attention": ((4.2, 1.9, 1.2), (8.4, 3.9, 2.4)),
    "residual, dropout, LayerNorm": ((3.2, 2.1, 1.4), (6.4, 4.3, 2.9)),
    "FFN": ((6.6, 6.6, 4.8), (22.7, 22.7, 19.1)),
    "projections": ((4.7, 4.2, 3.6), (16.5, 15.6, 14.3)),
    "Adam and embedding": ((1.5, 0.8, 0.5), (4.7, 2.3, 1.5)),
}
PLAN_TOTALS = ((34.0, 21.4, 15.9, 12.0), (76.2, 58.1, 48.3, 40.6))


@pytest.mark.parametrize(("shape", "column"), [(BASE, 0), (BIG, 1)])
def test_where_a_step_goes_on_one_h200(shape, column):
    parts = roofline_step.step(shape, H200)
    assert [part.name for part in parts] == list(PLAN)
    for part in parts:
        # the plan's figures have one decimal: 0.05 of rounding, and a hair of its own
        assert (part.eager, part.compiled, part.fused) == pytest.approx(PLAN[part.name][column], abs=0.06), part.name
    whole = roofline_step.total(parts)
    results = (whole.eager, whole.compiled, whole.fused, whole.products)
    assert results == pytest.approx(PLAN_TOTALS[column], abs=0.1)


def test_on_a_p100_nearly_everything_is_products():
    for shape in (BASE, BIG):
        whole = roofline_step.total(roofline_step.step(shape, DEVICES["P100"].machine("float16")))
        assert 0.95 <= whole.products / whole.fused <= 0.98


def test_decoding_at_batch_128_and_1():
    step = roofline_decode.decoding_step(BASE, H200, batch=128)
    parts = (step.weights, step.self_cache, step.cross_cache, step.cross_cache_copied, step.reorder)
    assert parts == pytest.approx((19, 20, 10, 40, 41), abs=0.6)
    assert (step.search, step.search_eager) == pytest.approx((9, 150), abs=0.5)
    assert step.launches_joined == 53
    # what the plan leaves out: so many rows take longer to multiply than to read the weights for
    assert step.products > 2 * step.weights
    assert roofline_decode.decoding_step(BASE, H200, batch=1).launch_share == pytest.approx(0.8, abs=0.02)


def test_decoding_by_hand():
    tiny = costs.Shape(d_model=2, heads=1, d_ff=3, vocabulary=5, layers=1)
    step = roofline_decode.decoding_step(tiny, Machine(flops=1e6, bandwidth=1e6), batch=3, beam=2, source=4, position=7)
    weights = 6 * 4 + 2 * 6 + 10  # q k v o, cross q o; two of the feed-forward; the table
    assert step.weights == 2 * weights
    assert step.products == 2 * 6 * weights
    assert step.self_cache == 6 * 7 * 2 * 2 * 2  # rows, tokens, k and v, channels, bytes
    assert step.cross_cache == 3 * 4 * 2 * 2 * 2
    assert step.search == 6 * 5 * 2


def test_a_better_device_is_never_slower():
    order = ("P100", "V100", "A100", "H100", "H200", "B200")
    machines = [DEVICES[name].machine("float16") for name in order]
    floors = [roofline_step.total(roofline_step.step(BASE, machine, tokens=25_000)).fused for machine in machines]
    assert floors == sorted(floors, reverse=True)


def test_every_device_is_a_chip_of_the_compile_matrix_and_names_its_source():
    for device in (*DEVICES.values(), H200_SUSTAINED):
        assert device.chip in CHIPS
        assert device.source
        assert device.half >= device.fp32
    assert H200_SUSTAINED.machine("bfloat16") == H200


def test_rates_by_dtype():
    a100, v100 = DEVICES["A100"], DEVICES["V100"]
    assert [a100.tflop_per_s(d) for d in ("float32", "tf32", "float16", "bfloat16")] == [19.5, 156, 312, 312]
    assert v100.tflop_per_s("tf32") == v100.fp32
    with pytest.raises(ValueError, match="float8"):
        a100.tflop_per_s("float8")


def test_the_command_prints_floors_for_every_device_and_for_one(capsys):
    assert roofline.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in DEVICES)
    assert "9.55 TFLOP" in out
    assert "not measured" in out
    assert roofline.main(["--device", "h200", "--model", "paper-big"]) == 0
    assert "989 TFLOP/s" in capsys.readouterr().out
    with pytest.raises(UserError, match="--device B300 is unknown: one of"):
        roofline.main(["--device", "B300"])


def test_the_suites_command_line_knows_what_is_made_from_records(tmp_path, capsys):
    for command in ("roofline", "static-evidence", "report", "compare"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"python -m benchmarks {command}" in capsys.readouterr().out
    missing = tmp_path / "none"
    assert main(["report", "--results", str(missing)]) == 2
    refusal = f"benchmarks: {missing} does not exist: give a folder of records or one file of them\n"
    assert capsys.readouterr().err == refusal
