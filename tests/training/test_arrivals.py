"""Numbers that arrive late from the device: the same log, and a host that is not far ahead."""

import pytest
import torch

from fasttfm.training import updates
from fasttfm.training.arrivals import Arrivals
from fasttfm.training.run import train

from .runs import CPU, assert_same_weights, log_without_times
from .test_divergence import poison


class Event:
    """An event that completes at the third query, or when synchronized."""

    def __init__(self):
        self.asked, self.waited = 0, False

    def record(self):
        pass

    def query(self):
        self.asked += 1
        return self.waited or self.asked > 2

    def synchronize(self):
        self.waited = True


class Late(Arrivals):
    """Arrivals on a CPU that behave as on a GPU."""

    def expect(self, tensor, use):
        super().expect(tensor, use)
        self._coming[-1] = self._coming[-1]._replace(arrived=Event())


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", [{"log_interval": 3, "update_freq": 2, "precision": "fp16"}, {"log_interval": 1}])
def test_the_log_is_that_of_numbers_that_arrive_at_once(tiny_data, tiny_values, tmp_path, monkeypatch, changes):
    """Records of skipped updates precede the validation and checkpoint of their update."""
    poison(monkeypatch, (1, 4, 6, 7))
    for name, kind in (("soon", Arrivals), ("late", Late)):
        monkeypatch.setattr(updates, "Arrivals", kind)
        train(tiny_values(max_update=7, **changes), tiny_data, tmp_path / name, CPU)
        train(tiny_values(max_update=11, **changes), tiny_data, tmp_path / name, CPU)
    assert log_without_times(tmp_path / "soon") == log_without_times(tmp_path / "late")
    assert_same_weights(tmp_path / "soon", tmp_path / "late")


def test_numbers_are_used_in_order_as_they_were_and_none_is_waited_for():
    used, late, number = [], Late(), torch.zeros(())
    for value in range(3):
        late.expect(number.fill_(value), used.append)
    late.take()
    assert used == []
    late.take()
    late.take()
    assert used == [0.0]
    late.take(wait=True)
    assert used == [0.0, 1.0, 2.0]


def test_the_host_is_four_numbers_ahead_at_most():
    late = Late()
    for ahead in range(8):
        late.expect(torch.ones(2), lambda numbers: None)
        late.keep_up()
        assert [each.arrived.waited for each in late._coming] == [at + 4 < ahead + 1 for at in range(ahead + 1)]
