"""Restarted ranks find each other, whatever earlier attempts left in the store."""

import datetime
import threading

import pytest
import torch.distributed as dist

from fasttfm.errors import UserError
from fasttfm.training.rendezvous import store_of_attempt

SHORT = datetime.timedelta(seconds=0.3)
LONG = datetime.timedelta(seconds=300)


def join(store, size, order):
    """The stores that ranks get, started in this order, each after the one before has polled."""
    stores = {}

    def run(rank):
        stores[rank] = store_of_attempt(store, rank, size, LONG)

    threads = []
    for rank in order:
        threads.append(threading.Thread(target=run, args=(rank,)))
        threads[-1].start()
        threads[-1].join(0.1)
    for thread in threads:
        thread.join()
    stores[0].set("written by 0", "yes")
    return stores


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_ranks_of_one_attempt_share_a_store_that_is_new(order):
    store = dist.HashStore()
    for _ in range(3):  # attempts, all in the store that the launcher keeps
        stores = join(store, 3, order)
        assert all(each.check(["written by 0"]) for each in stores.values())
        assert not stores[0].check(["of an earlier attempt"])
        stores[1].set("of an earlier attempt", "yes")


def test_a_life_that_ended_before_all_had_joined_is_not_waited_for():
    store = dist.HashStore()
    with pytest.raises(UserError, match="rank 0 has not joined"):
        store_of_attempt(store, 1, 2, SHORT)
    with pytest.raises(UserError, match="rank 1 of 2 has not joined"):
        store_of_attempt(store, 0, 2, SHORT)
    stores = join(store, 2, (1, 0))
    assert stores[1].check(["written by 0"])
    stores = join(store, 2, (0, 1))
    assert stores[1].check(["written by 0"])
