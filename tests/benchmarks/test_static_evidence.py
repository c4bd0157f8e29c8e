"""Predictions from machine code and shapes: counted by hand, labelled, and joined with what was measured."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.limits import static_evidence
from benchmarks.limits.static_evidence import DEVICES, GRAPH_LAUNCH_US, Compiled, Work, predict
from benchmarks.measure.records import load
from fasttfm.errors import UserError
from fasttfm.kernels.proof.costs import Cost
from fasttfm.kernels.proof.ledger import published
from fasttfm.kernels.proof.resources import Resources

H200, T4 = DEVICES["H200"], DEVICES["T4"]
SHAPE = {"B": 2, "H": 8, "L": 27, "D": 64}


def work(cost, *launches, elements=0):
    launches = launches or (("a.forward", 1.0),)
    return Work(
        case="attention", passes="forward", shape=SHAPE, dtype="bfloat16",
        cost=cost, elements=elements, launches=launches,
    )  # fmt: skip


def compiled(*, dtype="bf16", occupancy=1.0, registers=64, matrix=0, name="a.forward/64x64w4s1"):
    return Compiled(name, dtype, Resources(registers, 0, 1024, matrix), occupancy)


def test_many_warps_reach_the_bandwidth_and_few_do_not():
    cost = Cost(bytes=4_800_000, launches=1)  # a microsecond of an H200
    full = predict(work(cost), H200, {("a.forward", "sm_90"): [compiled()]})
    assert full.us == pytest.approx(1 + GRAPH_LAUNCH_US)
    few = predict(work(cost), H200, {("a.forward", "sm_90"): [compiled(occupancy=1 / 64, registers=16)]})
    # 132 processors, 32 threads each, 16 registers of 4 bytes, a quarter of them waiting 600 ns
    assert few.us == pytest.approx(4.8e6 / (132 * 32 * 16 / 600e-9) * 1e6 + GRAPH_LAUNCH_US)
    assert full.floor_us == few.floor_us == pytest.approx(1)


def test_without_matrix_instructions_products_run_at_the_rate_of_multiply_adds():
    cost = Cost(flops=989_000_000_000, launches=1)  # a millisecond of matrix units
    fast, slow = (predict(work(cost), H200, {("a.forward", "sm_90"): [compiled(matrix=matrix)]}) for matrix in (8, 0))
    assert fast.us == pytest.approx(1000 + GRAPH_LAUNCH_US)
    assert slow.us == pytest.approx(1000 * 989 / 67 + GRAPH_LAUNCH_US)
    assert (fast.bound, slow.bound) == ("products", "products")


def test_counted_instructions_can_take_longer_than_memory():
    """A warp of 32 elements takes the counted cycles of one of 40 * 4 schedulers, at the share that kernels reach."""
    heavy = dataclasses.replace(compiled(), resources=Resources(64, 0, 1024, 0, bound=50.0))
    results = predict(work(Cost(bytes=1000, launches=1), elements=32_000_000), T4, {("a.forward", "sm_75"): [heavy]})
    assert results.bound == "instructions"
    seconds = 1e6 * 50 / (40 * 4 * 1.59e9) / published.reached()
    assert results.us == pytest.approx(seconds * 1e6 + GRAPH_LAUNCH_US)


def test_a_work_with_dropout_is_not_predicted_from_a_kernel_without():
    plain = dataclasses.replace(compiled(), resources=Resources(64, 0, 1024, 0, bound=5.0))
    dropped = dataclasses.replace(
        compiled(name="a.forward/dropout/64x64w4s1"), resources=Resources(64, 0, 1024, 0, bound=50.0)
    )
    for dropout, tile in ((0.1, dropped), (0.0, plain)):
        wanted = dataclasses.replace(work(Cost(launches=1), elements=1000), shape={"dropout": dropout})
        assert predict(wanted, T4, {("a.forward", "sm_75"): [plain, dropped]}).compiled == (tile,)
        # one that was not counted would look as if it cost nothing
        uncounted = dataclasses.replace(tile, resources=dataclasses.replace(tile.resources, bound=0.0))
        assert predict(wanted, T4, {("a.forward", "sm_75"): [uncounted, plain, dropped]}).compiled == (tile,)


def test_the_elements_of_a_causal_attention_are_those_on_its_side_of_the_diagonal():
    shape = {"B": 2, "H": 3, "L": 4, "S": 4, "mask": "causal"}
    assert static_evidence._elements(shape) == 2 * 3 * (1 + 2 + 3 + 4)
    assert static_evidence._elements({"B": 2, "L": 5, "N": 7, "V": 9}) == 70
    assert static_evidence._elements({"M": 3, "V": 9}) == 27


def test_the_best_tile_is_taken_and_a_float32_product_stands_for_no_half_precision_one():
    cost = Cost(bytes=4_800_000, flops=1000, launches=1)
    poor, good = compiled(occupancy=0.01, registers=8), compiled(name="a.forward/128x64w8s1")
    results = predict(work(cost), H200, {("a.forward", "sm_90"): [poor, good]})
    assert results.compiled == (good,)
    assert predict(work(cost), H200, {("a.forward", "sm_90"): [compiled(dtype="fp32")]}) is None
    assert predict(work(cost), H200, {}) is None


def test_the_launches_of_a_work_share_its_cost():
    cost = Cost(bytes=9_600_000, launches=2)
    cases = {("a", "sm_90"): [compiled()], ("b", "sm_90"): [compiled()]}
    results = predict(work(cost, ("a", 0.75), ("b", 0.25)), H200, cases)
    assert results.us == pytest.approx(1.5 + 0.5 + 2 * GRAPH_LAUNCH_US)


def test_every_recorded_kernel_can_be_read_and_predictions_exist_from_pascal_to_blackwell():
    results = static_evidence.predictions()
    assert {"P100", "V100", "A100", "H200"} <= {prediction.device.name for prediction in results}
    for prediction in results:
        assert prediction.us >= prediction.floor_us > 0
    titles = [work.title for work in static_evidence.works()]
    assert len(titles) == len(set(titles))


def test_a_measurement_of_the_same_case_stands_beside_its_prediction(write, record):
    prediction = predict(work(Cost(bytes=1000, launches=1)), H200, {("a.forward", "sm_90"): [compiled()]})
    half = {"dtype": "bfloat16", "shape": SHAPE}
    on_h200 = record(p50=31.5, machine={"device": "NVIDIA H200"}, **half)
    others = [
        record(p50=1, machine={"device": "NVIDIA H100"}, **half),
        record(p50=2, **half),
        record(p50=3, provider="torch eager", machine={"device": "NVIDIA H200"}, **half),
        record(p50=4, machine={"device": "NVIDIA H200"}, **half | {"shape": SHAPE | {"L": 28}}),
    ]
    assert static_evidence.measured_us(prediction, load(write("a.jsonl", on_h200, *others))) == "31.5"
    assert static_evidence.measured_us(prediction, load(write("b.jsonl", *others))) == "-"


def test_the_command_says_that_nothing_was_measured(write, record, tmp_path, capsys):
    write("a.jsonl", record())
    assert static_evidence.main(["--device", "p100", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "predicted, not measured" in out
    assert " P100 " in out
    assert "H200" not in out
    with pytest.raises(UserError, match="--device P101 is unknown: one of P100"):
        static_evidence.main(["--device", "P101"])
