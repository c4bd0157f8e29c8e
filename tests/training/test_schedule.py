"""The learning rate over updates, and the recipes that are refused."""

import math

import pytest

from fasttfm.config.training import TrainingConfig
from fasttfm.training.schedule import learning_rate


def test_noam_is_equation_3_of_the_paper_and_tensor2tensor_doubles_it():
    single, double = (TrainingConfig(schedule="noam", warmup_updates=4000, noam_scale=scale) for scale in (1.0, 2.0))
    for step in (1, 100, 4000, 4001, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(single, 512, step) == pytest.approx(expected)
        assert learning_rate(double, 512, step) == pytest.approx(2 * expected)
    assert learning_rate(single, 512, 4000) == pytest.approx(6.99e-4, rel=1e-3)


WARM_UP = {1: 0.0001, 50: 0.005, 100: 0.01}


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"schedule": "inverse-sqrt"}, {**WARM_UP, 400: 0.005}),
        ({"schedule": "inverse-sqrt", "warmup_updates": 0}, {1: 0.01, 4: 0.005}),
        ({"schedule": "cosine"}, {**WARM_UP, 500: 0.0075, 700: 0.005, 1300: 0.0, 2000: 0.0}),
        ({"schedule": "cosine", "min_lr": 0.002}, {**WARM_UP, 500: 0.008, 700: 0.006, 1300: 0.002, 2000: 0.002}),
        ({"schedule": "linear", "min_lr": 0.002}, {**WARM_UP, 400: 0.008, 700: 0.006, 1300: 0.002, 2000: 0.002}),
        ({"schedule": "constant"}, {**WARM_UP, 2000: 0.01}),
    ],
)
def test_each_schedule_warms_up_and_falls_as_it_says(fields, rates):
    config = TrainingConfig(**{"lr": 0.01, "warmup_updates": 100, "max_update": 1300, **fields})
    assert {step: learning_rate(config, 512, step) for step in rates} == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("least", [0.0, 0.002])
def test_a_cosine_over_minutes_goes_by_the_clock_alone(least):
    shared = {"schedule": "cosine-minutes", "warmup_updates": 100, "max_minutes": 10, "max_update": 200}
    config = TrainingConfig(lr=0.01, min_lr=least, **shared)
    assert learning_rate(config, 512, 50, 0.0) == pytest.approx(0.005)
    for step in (100, 150, 9999):
        for seconds, share in ((0.0, 1.0), (200.0, 0.75), (300.0, 0.5), (600.0, 0.0), (900.0, 0.0)):
            expected = least + share * (0.01 - least)
            assert learning_rate(config, 512, step, seconds) == pytest.approx(expected, abs=1e-12)


def test_updates_count_from_1():
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(TrainingConfig(), 512, 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"update_freq": 0}, "update_freq"),
        ({"lr": 0.0}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"warmup_updates": -1}, "warmup_updates"),
        ({"adam_betas": (0.9, 1.0)}, "adam_betas"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"precision": "fp8"}, "precision"),
        ({"min_lr": -1.0}, "min_lr"),
        ({"keep_interval_updates": 0}, "keep_interval_updates"),
        ({"schedule": "noam", "warmup_updates": 0}, "noam"),
        ({"schedule": "cosine", "warmup_updates": 100, "max_update": 100}, "max_update"),
        ({"schedule": "cosine-minutes"}, "max_minutes"),
        ({"min_lr": 1e-9}, "not inverse-sqrt"),
        ({"schedule": "cosine", "lr": 1e-4, "min_lr": 1e-4}, "below lr"),
        ({"optimizer": "muon", "shard": True}, "optimizer.*does not support shard and precision fp16"),
        ({"optimizer": "muon", "precision": "fp16"}, "optimizer.*does not support shard and precision fp16"),
        ({"shard": True, "precision": "fp16"}, "shard.*needs precision bf16 or fp32"),
        ({"patience": 3, "valid_interval_updates": 0}, "valid_interval_updates"),
        ({"average_last": 5, "keep_interval_updates": 4}, "keep_interval_updates"),
    ],
)
def test_wrong_and_contradictory_settings_are_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        TrainingConfig(**settings)
