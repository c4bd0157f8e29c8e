"""A store that holds nothing of an earlier attempt, for ranks that torchrun has started again.

torchrun keeps one store for all attempts of a run (pytorch#135712), and gloo puts every rank's address there under the
same names each time. A rank that comes first after a restart then reads where another one listened before it was
killed: both wait for the other to connect, for ever, or are refused. Restart counts do not help: each machine counts
its own. So rank 0 gives every attempt a name, and the other ranks tell that they have it before anything else is read.
"""

import datetime
import json
import time
import uuid

import torch.distributed as dist

from fasttfm.errors import UserError
from fasttfm.system.parsing import parse_json

_PERIOD = 0.02
"""Seconds between two looks at the store."""


def store_of_attempt(store: dist.Store, rank: int, size: int, patience: datetime.timedelta) -> dist.Store:
    """`store` under a name that only the ranks of this attempt use. Every rank calls it once, in any order.

    Raises UserError where a rank has not come after `patience`.
    """
    store = dist.PrefixStore("fasttfm", store)
    deadline = time.monotonic() + patience.total_seconds()
    attempt = _name_attempt(store, size, deadline) if rank == 0 else _join_attempt(store, rank, deadline)
    return dist.PrefixStore(attempt, store)


def _name_attempt(store: dist.Store, size: int, deadline: float) -> str:
    """Rank 0's part: publish the name with the tokens seen so far until every other rank has answered with the name."""
    name = uuid.uuid4().hex
    others = range(1, size)
    while missing := [rank for rank in others if _read(store, f"answer/{rank}") != name]:
        # a token may be of a rank's earlier life: it is read again until the living one answers
        tokens = {rank: _read(store, f"token/{rank}") for rank in others}
        store.set("attempt", json.dumps({"name": name, "tokens": tokens}))
        _pause(deadline, f"rank {missing[0]} of {size} has not joined: look at its machine's output")
    return name


def _join_attempt(store: dist.Store, rank: int, deadline: float) -> str:
    """Another rank's part: answer the first name that was published with the token of this process."""
    token = uuid.uuid4().hex
    store.set(f"token/{rank}", token)
    while True:
        attempt = parse_json(_read(store, "attempt") or '{"tokens": {}}')
        if attempt["tokens"].get(str(rank)) == token:
            store.set(f"answer/{rank}", attempt["name"])
            return attempt["name"]
        _pause(deadline, "rank 0 has not joined: look at its machine's output")


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _pause(deadline: float, complaint: str) -> None:
    if time.monotonic() > deadline:
        raise UserError(complaint)
    time.sleep(_PERIOD)
