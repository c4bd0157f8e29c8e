"""A case whose reference is plain(), timed by a fake clock."""

import torch

from benchmarks.measure import harness, records
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.machine import describe

HERE = describe()
SETTING = Setting(device=torch.device("cpu"), dtype=torch.float32, level="smoke")


class FakeClock:
    """Each run takes ten microseconds. A provider runs ten times: first, check, warm-up twice, memory, launches, three
    rounds, check."""

    name = "fake"

    def __init__(self):
        self.runs = 0

    def microseconds(self, run):
        self.runs += 1
        run()
        return 10.0

    def peak_bytes(self, run):
        run()
        return 1000

    def launches(self, run):
        run()
        return 3


def draw(i):
    return (torch.randn(8, 16, requires_grad=True),)


def plain(x):
    return torch.tanh(x) * 2


def rows(providers, passes="forward", *, seconds=0.0, cost=None, ceilings=None, clock=None, setting=SETTING, **work):
    """Provider -> record of a work whose reference is plain()."""
    work = Work(**{"inputs": draw, "providers": providers, "reference": plain, **work})
    case = Case(
        group="kernels", name="toy", shape={"M": 8}, dtype="float32", passes=passes, cost=cost, make=lambda: work
    )
    results = harness.run(case, setting, clock or FakeClock(), seconds, ceilings=ceilings, machine=HERE, least_rounds=3)
    for record in results:
        records.validate(record)
    return {record["provider"]: record for record in results}
