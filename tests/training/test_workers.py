"""Several ranks train the weights of one, resume after kills and signals, and print each message once."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import children_of
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE, wait_for_end

from fasttfm.cli.workers import number_of_workers, usable_cores
from fasttfm.cpu.step_passes import usable
from fasttfm.errors import UserError
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.steps import saved_steps, step_folder
from fasttfm.system import machine
from fasttfm.system.children import command_line
from fasttfm.training import workers
from fasttfm.training.updates import _seed
from fasttfm.training.workers import LOST_PEER, cores_of_rank, share_of_rows

from . import ranks
from .runs import TIMES, assert_same_weights, log_without_times, records, weights_of
from .tiny import run, start, train_command, words

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def assert_close(one, other):
    """Assert equal weights up to rounding, after some updates of Adam with sums in another order."""
    torch.testing.assert_close(weights_of(one), weights_of(other), rtol=1e-4, atol=2e-5)


def trained(model_dir):
    """Training records without what differs between equal runs."""
    log = log_without_times(model_dir, (*TIMES, "batch_shapes", "gradient_norm"))
    return [record for record in log if record["kind"] == "train"]


@given(size=st.integers(1, 9), batches=st.integers(1, 9), rows=st.integers(1, 40))
def test_every_row_of_an_update_is_of_one_rank(size, batches, rows):
    for batch in range(batches):
        shares = [share_of_rows(rank, size, batch, batches, rows) for rank in range(size)]
        taken = [row for begin, end in shares for row in range(begin, end)]
        assert taken == list(range(rows))
    if batches % size == 0:  # whole batches
        for rank in range(size):
            shares = [share_of_rows(rank, size, batch, batches, rows) for batch in range(batches)]
            assert sorted(end - begin for begin, end in shares)[-batches // size :] == [rows] * (batches // size)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("run_ranks", "update_freq", "changes"),
    [
        (False, 4, {"clip_norm": 1.0}),
        (True, 1, {}),
        (True, 3, {"packed": True}),
        (True, 1, {"max_tokens": 32, "subword_sampling": 0.1}),
        (False, 1, {"max_tokens": 32, "subword_sampling": 0.1}),
    ],
    ids=[
        "1x4 2x2 4x1, without numba",
        "a batch in parts",
        "batches and a half",
        "fewer rows than ranks, sampling",
        "fewer rows than ranks, sampling, without numba",
    ],
    indirect=["run_ranks"],
)
def test_one_two_and_four_ranks_end_in_the_same_weights(run_ranks, tiny_data, tmp_path, update_freq, changes):
    """Without dropout, whose masks depend on the rank; tolerance 2e-5, with Adam's steps up to 12 x 0.005 in total."""
    changes = {"dropout": 0.0, "update_freq": update_freq, "adam_eps": 1e-4, "valid_interval_updates": 0, **changes}
    sizes = (1, 2, 4)
    runs = [{"size": n, "words": words(tiny_data, tmp_path / str(n), **changes)} for n in sizes]
    statuses, stderr = run_ranks(*runs)
    assert statuses == [[0] * size for size in sizes], stderr
    for size in (2, 4):
        assert_close(tmp_path / "1", tmp_path / str(size))
        for one, other in zip(trained(tmp_path / "1"), trained(tmp_path / str(size)), strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                tolerance = 1e-4 if key in ("loss", "nll") else 0
                assert value == (pytest.approx(other[key], rel=tolerance) if tolerance else other[key]), key


def test_a_lost_connection_ends_a_rank_silently_and_no_other_error_does():
    for raised, expected in (
        (RuntimeError("Connection closed by peer"), SystemExit),
        (RuntimeError("CUDA out of memory"), RuntimeError),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), torch.AcceleratorError),
    ):
        with pytest.raises(expected), workers._ending_with_peers():
            raise raised


def test_ranks_drop_out_differently():
    """Equal masks on two ranks would halve the noise."""
    assert len({_seed(1, step, rank) for step in range(50) for rank in range(4)}) == 200


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("run_ranks", "changes"),
    [
        (False, {"ema_decay": 0.9}),
        (True, {"precision": "bf16", "update_freq": 2}),
        (True, {"optimizer": "muon", "precision": "auto"}),
    ],
    ids=["ema, without numba", "bf16", "muon"],
    indirect=["run_ranks"],
)
def test_two_ranks_go_on_bit_by_bit_and_another_number_says_what_changes(run_ranks, tiny_data, tmp_path, changes):
    whole, parts, other = (tmp_path / name for name in ("whole", "parts", "other"))
    statuses, stderr = run_ranks(
        {"size": 2, "words": words(tiny_data, whole, **changes)},
        {"size": 2, "words": words(tiny_data, parts, max_update=5, **changes)},
        {"size": 2, "words": words(tiny_data, parts, **changes)},
        {"size": 2, "words": words(tiny_data, other, max_update=5, **changes)},
        {"size": 1, "words": words(tiny_data, other, **changes)},
    )
    assert statuses == [[0, 0]] * 4 + [[0]], stderr
    assert_same_weights(whole, parts)
    assert trained(whole) == trained(parts)
    assert saved_steps(other)[-1] == 12
    assert re.findall(r"^updates up to .*$", stderr, re.M) == [
        "updates up to 5 were computed by 2 workers, later ones by 1: on the same batches, with other dropout masks "
        "and rounding"
    ]
    assert stderr.count("finished: max_update 12 is reached") == 3  # rank 0 alone tells


@pytest.fixture(scope="module")
def uninterrupted(tiny_data, tmp_path_factory):
    """A model trained by two ranks without faults."""
    out = tmp_path_factory.mktemp("uninterrupted") / "M"
    command = words(tiny_data, out, save_interval_updates=2)
    statuses, stderr = ranks.run_ranks({"size": 2, "words": command}, numba=usable())
    assert statuses == [[0, 0]], stderr
    return out


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["error", "SIGKILL"])
def test_a_rank_that_fails_ends_all_and_is_the_only_one_to_tell(
    run_ranks, uninterrupted, tiny_data, tmp_path, rank, kind
):
    out = tmp_path / "M"
    command = words(tiny_data, out, save_interval_updates=2)
    (statuses, repeated), stderr = run_ranks(
        {"size": 2, "words": command, "fault": [rank, 6, kind]}, {"size": 2, "words": command}
    )
    assert statuses[rank] == (2 if kind == "error" else -signal.SIGKILL)
    assert statuses[1 - rank] == LOST_PEER
    assert repeated == [0, 0]
    assert "Traceback" not in stderr
    assert re.findall(r"^fasttfm train: .*$", stderr, re.M) == ["fasttfm train: this rank has met a wall"] * (
        kind == "error"
    )
    # the kill may come while the checkpoint of update 4 is written
    assert re.search(rf"resuming from update {'[24]' if kind == 'SIGKILL' else 4} in {re.escape(str(out))}", stderr)
    assert_same_weights(uninterrupted, out)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "at", "saved"), [("SIGTERM", 6, 6), ("validation", 1, 4)])
def test_a_signal_to_one_rank_saves_once_and_the_run_goes_on(run_ranks, tiny_data, tmp_path, rank, kind, at, saved):
    """In an update, and while all validate, which they do again then."""
    out = tmp_path / "M"
    command = words(tiny_data, out, save_interval_updates=0)
    (stopped, repeated), stderr = run_ranks(
        {"size": 2, "words": command, "fault": [rank, at, kind]}, {"size": 2, "words": command}
    )
    assert (stopped, repeated) == ([143, 143], [0, 0]), stderr
    assert re.findall(r"^fasttfm train: .*$", stderr, re.M) == [
        f"fasttfm train: stopped after update {saved}, which is saved: run the same command again to resume"
    ]
    assert f"resuming from update {saved} in" in stderr
    assert [record["step"] for record in records(out, "valid")] == [4, 8, 12]


def test_ranks_divide_validation_and_find_what_one_finds(run_ranks, tiny_data, tmp_path):
    """With frozen weights; some of 5 ranks have no batch, and parts of the 12 pairs differ in size."""
    changes = {"lr": 1e-30, "max_update": 4, "average_last": 0}
    sizes = (1, 2, 5)
    runs = [{"size": n, "words": words(tiny_data, tmp_path / str(n), **changes)} for n in sizes]
    statuses, stderr = run_ranks(*runs)
    assert statuses == [[0] * run["size"] for run in runs], stderr
    (one,) = records(tmp_path / "1", "valid")
    lines = (tmp_path / "1" / "hypotheses" / "valid.step-000000004.txt").read_text()
    assert len(lines.splitlines()) == 12
    for size in (2, 5):
        (other,) = records(tmp_path / str(size), "valid")
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["nll"] == pytest.approx(one["nll"], rel=1e-6)
        assert other["bleu"] == one["bleu"]
        assert (tmp_path / str(size) / "hypotheses" / "valid.step-000000004.txt").read_text() == lines


def test_a_nan_loss_on_one_rank_lets_all_skip_the_update(run_ranks, tiny_data, tmp_path):
    out = tmp_path / "M"
    command = words(tiny_data, out, save_interval_updates=1, valid_interval_updates=0, log_interval=1)
    (statuses,), stderr = run_ranks({"size": 2, "words": command, "fault": [1, 6, "nan"]})
    assert statuses == [0, 0], stderr
    assert [record["step"] for record in records(out, "skipped")] == [6]
    before, after = (read_weights(step_folder(out, step)) for step in (5, 6))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(record["loss"] for record in records(out, "train") if record["step"] != 6)


@pytest.mark.whole
def test_a_rank_that_hangs_times_out_as_configured(run_ranks, tiny_data, tmp_path):
    out = tmp_path / "M"
    command = words(tiny_data, out, save_interval_updates=2, valid_interval_updates=0, rank_timeout_minutes=0.2)
    (statuses,), stderr = run_ranks({"size": 2, "words": command, "fault": [1, 6, "hang"]})
    assert statuses == [2, 0], stderr
    (told,) = re.findall(r"^fasttfm train: .*$", stderr, re.M)
    assert "another rank has not answered for --rank-timeout-minutes" in told
    assert saved_steps(out)[-1] == 4
    assert "Traceback" not in stderr


def test_wrong_data_is_told_once(run_ranks, tmp_path):
    (statuses,), stderr = run_ranks({"size": 2, "words": words(tmp_path / "none", tmp_path / "M")})
    assert statuses == [2, LOST_PEER]
    assert len(stderr.splitlines()) == 1
    assert "not a prepared data directory" in stderr


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")


# By the launcher


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_minutes_count_from_the_start_of_the_command(tiny_data, tmp_path, workers):
    """The command started two minutes ago; an update takes less than one."""
    given = [*words(tiny_data, tmp_path / "M", max_update=1, max_minutes=1), "--workers", workers]
    done = run(command_line(*given, started=time.monotonic() - 120))
    assert done.returncode == 0, done.stderr
    assert "finished: max_minutes 1 are over; no update was made" in done.stdout


def wait_for(process, text):
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not said")


LONG = {"max_update": 100_000, "valid_interval_updates": 0, "save_interval_updates": 0, "log_interval": 2}


@pytest.mark.slow
@needs_proc
def test_a_launched_run_stops_by_one_line_and_goes_on(tiny_data, tmp_path):
    out = tmp_path / "M"
    process = start([*train_command(tiny_data, out, **LONG), "--workers", "2"])
    wait_for(process, "epoch 1")
    for _ in range(2):  # as GNU timeout does
        process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, stderr
    assert stdout == ""
    (step,) = saved_steps(out)
    assert [line for line in stderr.splitlines() if "tokens/s" not in line] == [
        f"fasttfm train: stopped after update {step:,}, which is saved: run the same command again to resume"
    ]
    repeated = run([*train_command(tiny_data, out, **{**LONG, "max_update": step + 3}), "--workers", "2"])
    assert repeated.returncode == 0
    assert f"resuming from update {step:,}" in repeated.stderr
    assert "2 workers with 1 thread each" in repeated.stderr
    assert repeated.stdout.splitlines()[-1] == f"model: {out}"


@pytest.mark.slow
@needs_proc
def test_a_killed_worker_ends_the_run_and_a_killed_launcher_too(tiny_data, tmp_path):
    command = [*train_command(tiny_data, tmp_path / "M", **LONG), "--workers", "2"]
    process = start(command)
    wait_for(process, "epoch 1")
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    lines = [line for line in stderr.splitlines() if "tokens/s" not in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("fasttfm train: worker 1 was ended by SIGKILL")
    process = start(command)
    wait_for(process, "epoch 1")
    ranks = children_of(process.pid)
    process.kill()
    wait_for_end(ranks)
    assert len(saved_steps(tmp_path / "M")) == 1
    process.communicate(timeout=PATIENCE)


KILLED_ONCE = """
import os, signal, sys
from fasttfm.__main__ import command
from fasttfm.training.optimization import Optimization

step, left = Optimization.step, 9

def killed(*given):
    global left
    left -= 1
    if not left and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*given)

Optimization.step = killed
sys.exit(command())
"""


@pytest.mark.whole
@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tiny_data, tmp_path):
    """And --workers is the same run."""
    changes = {"max_update": 12, "save_interval_updates": 4, "valid_interval_updates": 0, "log_interval": 1}
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", str(tmp_path / "killed_once.py")]
    restarted = run([*command, *words(tiny_data, tmp_path / "M", **changes)])
    assert restarted.returncode == 0, restarted.stderr
    assert re.search(r"resuming from update [48]", restarted.stderr)  # update 8's may be incomplete
    assert restarted.stdout.count("finished: max_update 12 is reached") == 1
    launched = run([*train_command(tiny_data, tmp_path / "N", **changes), "--workers", "2"])
    assert launched.returncode == 0
    assert_same_weights(tmp_path / "M", tmp_path / "N")


def test_how_many_workers(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("fasttfm.cli.workers.usable_cores", lambda: 8)
    for asked, threads, device, expected in ((None, 0, "cpu", 8), (None, 4, "cpu", 1), (3, 4, "cpu", 3)):
        assert number_of_workers(asked, threads, device) == expected
    assert number_of_workers(None, 0, "cuda") == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert number_of_workers(None, 0, "cpu") == number_of_workers(4, 0, "cpu") == 1
    with pytest.raises(UserError, match="torchrun has started 4 processes"):
        number_of_workers(2, 0, "cpu")


def test_cores_are_what_a_container_and_openmp_allow_at_most(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert usable_cores() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "Path", lambda path: limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for text, cores in (("max 100000\n", 4), ("400000 100000\n", 2), ("50000 100000\n", 1)):
        limit.write_text(text)
        assert cores_of_rank() == cores
