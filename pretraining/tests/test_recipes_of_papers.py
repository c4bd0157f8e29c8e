"""The presets that carry a paper's name: its schedule and decay, and a list of what differs."""

import pytest

from fasttfm.config.presets import preset_path, preset_section
from fasttfm.config.training import TrainingConfig
from fasttfm.training.schedule import learning_rate

PAPERS = [
    ("bert", "bert-base"), ("albert", "albert-base"), ("electra", "electra-small"), ("gpt", "gpt2-small"),
    ("finetune", "bert"), ("finetune", "gpt"), ("task-student", "tinybert-layers"), ("task-student", "tinybert-task"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [*PAPERS, ("student", "distilbert"), ("student", "tinybert")])
def test_a_preset_lists_what_differs_from_its_paper(kind, name):
    head = preset_path(name, kind).read_text(encoding="utf-8").split("\n\n")[0]
    assert "nlike" in head
    assert sum(line.startswith("# - ") for line in head.splitlines()) >= 2


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
