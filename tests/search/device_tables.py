"""The device engine for table models, and fixtures that select an engine."""

import pytest
import torch

from fasttfm.search import search, streaming
from fasttfm.search.continuous import RunningSearch
from fasttfm.search.device import choice, engine
from fasttfm.search.device.decoder import StepDecoder
from fasttfm.search.device.search import DeviceSearch

from .table_model import TableModel


class TableDecoder:
    """StepDecoder of a TableModel, which reads outputs through the ancestors of the state's rows."""

    def __init__(self, model, state, *_):
        self.model, self.state = model, state
        self.sources = torch.zeros(state.sizes.places + 1, dtype=torch.int64)

    def remember(self, source, lengths, places):
        self.sources[places] = source[:, 0]

    def __call__(self):
        state = self.state
        choice.remember_places(state)
        sources = self.sources[state.sentence].tolist()
        lengths, written = state.position.tolist(), choice.history(state).tolist()
        logits = torch.zeros(state.sizes.rows, state.sizes.vocabulary)
        live = (state.scores > -torch.inf) & (state.sentence < state.sizes.places)[:, None]
        for slot, row in live.nonzero().tolist():
            values = self.model.logits(sources[slot], tuple(written[slot][row][: lengths[slot]]))
            logits[slot * state.sizes.beam + row] = torch.tensor(values)
        if live.any():
            self.model.read.append(state.newest[live].tolist())
        return logits


def decoder_of(model, state, *parts):
    return (TableDecoder if isinstance(model, TableModel) else StepDecoder)(model, state, *parts)


def search_by(monkeypatch, kind):
    """Make all searches DeviceSearch (on CPU tensors) or RunningSearch."""
    for module in (search, streaming):
        monkeypatch.setattr(module, "running_search", lambda *_: kind)
    monkeypatch.setattr(engine, "StepDecoder", decoder_of)


@pytest.fixture(params=["stepwise", "device"])
def either_engine(request, monkeypatch):
    """Run the test with host and device searches, the latter on CPU tensors."""
    search_by(monkeypatch, DeviceSearch if request.param == "device" else RunningSearch)
    return request.param
