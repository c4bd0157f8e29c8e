"""A search step as kernel launches that are prepared once, bound to their buffers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.kernels import search
from fasttfm.models.step_layers import Call
from fasttfm.search.device.choice import Rules
from fasttfm.search.device.state import State


def embed(state: State, table: Tensor, positions: Tensor, pad_id: int, out: Tensor) -> Call:
    """Kernel version of decoder.embed()."""
    launch = search.Embed(table, positions, sizes_of(state), table.shape[1] ** 0.5, pad_id)
    return partial(launch, memory_of(state), table, positions, out)


def memory_of(state: State) -> search.Memory:
    """The buffers of a state, as the kernels' argument."""
    return search.Memory(*(getattr(state, name) for name in search.Memory._fields))


def sizes_of(state: State) -> search.Sizes:
    """The sizes of a state, as the kernels' argument."""
    slots, beam, nbest, steps, _, places, vocabulary = state.sizes
    return search.Sizes(slots, beam, nbest, steps, places, vocabulary)


def admit(state: State) -> Call:
    """Kernel version of choice.admit()."""
    return partial(search.Admit(sizes_of(state), BOS, state.device), memory_of(state))


def choose_beams(state: State, logits: Tensor, rules: Rules) -> list[Call] | None:
    """Kernel version of choice.choose_beams() for logits (R, V); None for sizes that the kernels do not support."""
    sizes, memory = sizes_of(state), memory_of(state)
    if not search.takes(sizes.K, sizes.V, len(logits)):
        return None
    refused, calls = rules.never, []
    if rules.by_history:
        refused = rules.never.new_empty(logits.shape)

        def refuse() -> None:
            torch.logical_or(rules.completions(state).view(refused.shape), rules.never, out=refused)

        calls.append(refuse)
    shares = search.new_shares(sizes, state.device)
    likeliest, choose = search.Likeliest(logits, refused, sizes, EOS), search.Choose(sizes, shares, EOS)
    calls.append(partial(likeliest, memory, logits, refused, rules.selected, shares))
    return [*calls, partial(choose, memory, shares)]
