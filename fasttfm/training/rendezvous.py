"""A fresh rendezvous store for ranks that torchrun restarted.

torchrun keeps one store for all attempts of a run (pytorch#135712), and gloo stores every rank's address in it under
the same keys each time. After a restart, a rank may read the address where another one listened before it was killed:
both then wait forever for a connection, or are refused. Restart counts do not help, because each machine has its own.
So rank 0 names every attempt, and the other ranks acknowledge the name before anything else is read.
"""

import datetime
import json
import time
import uuid

import torch.distributed as dist

from fasttfm.errors import UserError
from fasttfm.system.parsing import parse_json

_PERIOD = 0.02
"""Polling interval in seconds."""


def store_of_attempt(store: dist.Store, rank: int, size: int, patience: datetime.timedelta) -> dist.Store:
    """Prefix `store` with a name unique to this attempt; every rank calls it once.

    Raises UserError if a rank does not join within `patience`.
    """
    store = dist.PrefixStore("fasttfm", store)
    deadline = time.monotonic() + patience.total_seconds()
    attempt = _name_attempt(store, size, deadline) if rank == 0 else _join_attempt(store, rank, deadline)
    return dist.PrefixStore(attempt, store)


def _name_attempt(store: dist.Store, size: int, deadline: float) -> str:
    """On rank 0, publish a name with the tokens seen so far until all other ranks have answered with it."""
    name = uuid.uuid4().hex
    others = range(1, size)
    while missing := [rank for rank in others if _read(store, f"answer/{rank}") != name]:
        # a token may be from before the restart: read it again until the live rank answers
        tokens = {rank: _read(store, f"token/{rank}") for rank in others}
        store.set("attempt", json.dumps({"name": name, "tokens": tokens}))
        _pause(deadline, f"rank {missing[0]} of {size} has not joined: look at its machine's output")
    return name


def _join_attempt(store: dist.Store, rank: int, deadline: float) -> str:
    """On other ranks, answer the first name published with this process's token."""
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
