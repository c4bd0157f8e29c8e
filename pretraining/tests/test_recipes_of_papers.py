"""The presets that carry a paper's name: its schedule and decay."""

import pytest

from fasttfm.config.presets import preset_section
from fasttfm.config.training import TrainingConfig
from fasttfm.training.schedule import learning_rate

PAPERS = [
    ("bert", "bert-base"), ("albert", "albert-base"), ("electra", "electra-small"), ("gpt", "gpt2-small"),
    ("finetune", "bert"), ("finetune", "gpt"), ("task-student", "tinybert-layers"), ("task-student", "tinybert-task"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), PAPERS)
def test_the_rate_falls_as_in_the_paper_and_biases_and_norms_do_not_decay(kind, name):
    fields = preset_section(name, "training", kind)
    fields.setdefault("max_update", 100_000)
    fields["warmup_updates"] = min(fields.get("warmup_updates", 0), fields["max_update"] // 10)
    config = TrainingConfig(**fields)
    assert (config.decayed, config.label_smoothing) == ("matrices", 0.0)
    last = learning_rate(config, 768, config.max_update)
    middle = learning_rate(config, 768, (config.max_update + config.warmup_updates) // 2)
    if name == "gpt2-small":
        assert last == pytest.approx(0.1 * config.lr)
        assert middle == pytest.approx(0.55 * config.lr, rel=1e-3)
    else:
        assert (config.schedule, last) == ("linear", 0.0)
        assert middle == pytest.approx(0.5 * config.lr, rel=1e-3)
