"""The learning rate over updates."""

import math

import pytest

from fasttfm.config.training import TrainingConfig
from fasttfm.training.schedule import learning_rate


def test_noam_is_equation_3_of_the_paper():
    config = TrainingConfig(schedule="noam", warmup_updates=4000)
    for step in (1, 100, 4000, 4001, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(config, 512, step) == pytest.approx(expected)
    assert learning_rate(config, 512, 4000) == pytest.approx(6.99e-4, rel=1e-3)


def test_tensor2tensor_doubles_noam():
    single, twice = (TrainingConfig(schedule="noam", noam_scale=scale) for scale in (1.0, 2.0))
    assert learning_rate(twice, 512, 7) == 2 * learning_rate(single, 512, 7)


@pytest.mark.parametrize("schedule", ["inverse-sqrt", "cosine", "linear", "constant"])
def test_warm_up_rises_linearly_to_lr(schedule):
    config = TrainingConfig(schedule=schedule, lr=0.01, warmup_updates=100, max_update=1000)
    assert learning_rate(config, 512, 1) == pytest.approx(0.0001)
    assert learning_rate(config, 512, 50) == pytest.approx(0.005)
    assert learning_rate(config, 512, 100) == pytest.approx(0.01)


def test_after_warm_up_each_schedule_falls_as_it_says():
    shared = {"lr": 0.01, "warmup_updates": 100, "max_update": 1100}
    schedules = {name: TrainingConfig(schedule=name, **shared) for name in ("inverse-sqrt", "cosine", "constant")}
    assert learning_rate(schedules["inverse-sqrt"], 512, 400) == pytest.approx(0.005)
    assert learning_rate(schedules["cosine"], 512, 600) == pytest.approx(0.005)
    assert learning_rate(schedules["cosine"], 512, 1100) == pytest.approx(0, abs=1e-12)
    assert learning_rate(schedules["cosine"], 512, 2000) == pytest.approx(0, abs=1e-12)
    assert learning_rate(schedules["constant"], 512, 2000) == 0.01
    at_once = TrainingConfig(schedule="inverse-sqrt", lr=0.01, warmup_updates=0)
    assert [learning_rate(at_once, 512, step) for step in (1, 4)] == [0.01, 0.005]


def test_linear_falls_to_0_and_a_schedule_that_falls_ends_at_min_lr():
    shared = {"lr": 0.01, "warmup_updates": 100, "max_update": 1100}
    linear = TrainingConfig(schedule="linear", **shared)
    for step, rate in ((50, 0.005), (100, 0.01), (350, 0.0075), (850, 0.0025), (1100, 0.0), (2000, 0.0)):
        assert learning_rate(linear, 512, step) == pytest.approx(rate, abs=1e-12)
    linear = TrainingConfig(schedule="linear", min_lr=0.002, **shared)
    cosine = TrainingConfig(schedule="cosine", min_lr=0.002, **shared)
    minutes = TrainingConfig(schedule="cosine-minutes", min_lr=0.002, max_minutes=10, **shared)
    for config in (linear, cosine):
        rates = [learning_rate(config, 512, step) for step in (50, 100, 600, 1100, 2000)]
        assert rates == pytest.approx([0.005, 0.01, 0.006, 0.002, 0.002])
    assert learning_rate(minutes, 512, 100, 600.0) == pytest.approx(0.002)
    assert learning_rate(minutes, 512, 50, 0.0) == pytest.approx(0.005)


def test_a_cosine_over_minutes_goes_by_the_clock_alone():
    config = TrainingConfig(schedule="cosine-minutes", lr=0.01, warmup_updates=100, max_minutes=10, max_update=200)
    assert learning_rate(config, 512, 50, 0.0) == pytest.approx(0.005)
    for step in (100, 150, 9999):
        assert learning_rate(config, 512, step, 0.0) == pytest.approx(0.01)
        assert learning_rate(config, 512, step, 200.0) == pytest.approx(0.0075)
        assert learning_rate(config, 512, step, 300.0) == pytest.approx(0.005)
        assert learning_rate(config, 512, step, 600.0) == learning_rate(config, 512, step, 900.0) == 0


def test_updates_count_from_1():
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(TrainingConfig(), 512, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("update_freq", 0),
        ("lr", 0.0),
        ("lr", math.inf),
        ("warmup_updates", -1),
        ("adam_betas", (0.9, 1.0)),
        ("label_smoothing", 1.0),
        ("ema_decay", 1.0),
        ("precision", "fp8"),
        ("schedule", "polynomial"),
        ("min_lr", -1.0),
        ("decayed", "biases"),
        ("optimizer", "sgd"),
        ("keep_interval_updates", 0),
        ("max_update", 0),
    ],
)
def test_a_wrong_value_is_refused_and_named(field, value):
    with pytest.raises(ValueError, match=field):
        TrainingConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedule": "noam", "warmup_updates": 0}, "noam"),
        ({"schedule": "cosine", "warmup_updates": 100, "max_update": 100}, "max_update"),
        ({"schedule": "linear", "warmup_updates": 100, "max_update": 100}, "schedule linear"),
        ({"min_lr": 1e-9}, "not inverse-sqrt"),
        ({"schedule": "cosine", "lr": 1e-4, "min_lr": 1e-4}, "below lr"),
        ({"optimizer": "muon", "shard": True}, r"optimizer.*does not support shard and precision fp16"),
        ({"optimizer": "muon", "precision": "fp16"}, r"optimizer.*does not support shard and precision fp16"),
        ({"schedule": "cosine-minutes"}, "max_minutes"),
        ({"patience": 3, "valid_interval_updates": 0}, "valid_interval_updates"),
        ({"average_last": 5, "keep_interval_updates": 4}, "keep_interval_updates"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        TrainingConfig(**settings)
