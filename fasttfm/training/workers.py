"""The processes that train one model together, a rank each, as torchrun starts them.

Every rank holds the whole model. An update's batches are divided among the ranks, the gradients are summed, and every
rank takes the same step, so that all hold the same weights bit by bit. Rank 0 alone touches the model directory: the
others get weights and state from it, and need the prepared data only. What is no gradient goes through gloo, which runs
on every machine.
"""

import datetime
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fasttfm.errors import LOST_PEER, UserError, interrupted
from fasttfm.system.machine import allowed_cores
from fasttfm.system.signals import ending_at_once, ignore_repeats
from fasttfm.training.rendezvous import store_of_attempt

_PATIENCE_TO_JOIN = datetime.timedelta(minutes=30)
"""How long ranks wait for one another at the start, at most."""
_PATIENCE_TO_CONNECT = datetime.timedelta(seconds=60)
"""How long ranks that have all answered a moment ago wait for one another's connections."""
_LAST_TENSORS = 0.1
"""Seconds; microseconds suffice where the machine is not busy."""


class Workers:
    """The ranks of a run; without a process group the one process, for which all of this does nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        """Number of ranks."""
        self._parent = os.getppid()

    @property
    def is_first(self) -> bool:
        """True if this process is the one that validates, logs and saves."""
        return self.rank == 0

    @property
    def is_orphaned(self) -> bool:
        """True if the launcher was killed, so that nobody looks after the ranks any more."""
        return self.size > 1 and os.getppid() != self._parent

    def wait(self) -> None:
        """Until every rank is here."""
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of the values over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks in place, on its device; every rank gets the same bits."""
        if self.size > 1:
            with _ending_with_peers():
                dist.all_reduce(tensor)

    def begin_to_add_up(self, tensor: Tensor) -> Callable[[], None]:
        """Begin add_up() and go on; leave the tensor alone until the function that is returned has been called."""
        with _ending_with_peers():
            work = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with _ending_with_peers():
                work.wait()

        return wait

    def gather(self, value: Any) -> list[Any]:
        """Collect an object of each rank, which must be picklable, by rank; every rank gets it."""
        return [self.broadcast(value, source) for source in range(self.size)]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Send one rank's object, which must be picklable; the others' values are not looked at."""
        if self.size == 1:
            return value
        values = [value]
        with _ending_with_peers():
            dist.broadcast_object_list(values, src=source, device=torch.device("cpu"))
        return values[0]

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's tensors by name, on the CPU; the others give None."""
        if self.size == 1:
            assert tensors is not None
            return tensors
        kinds = None if tensors is None else {name: (each.shape, each.dtype) for name, each in tensors.items()}
        shared = {}
        for name, (shape, dtype) in self.broadcast(kinds).items():
            tensor = (
                torch.empty(shape, dtype=dtype, device="cpu")
                if tensors is None
                else tensors[name].detach().cpu().contiguous()
            )
            with _ending_with_peers():
                dist.broadcast(tensor, src=0)
            shared[name] = tensor
        return shared

    def _reduced(self, values: Sequence[float], kind: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        with _ending_with_peers():
            dist.all_reduce(tensor, kind)
        return tensor.tolist()


ALONE = Workers()
"""This process, without others."""


@contextmanager
def joined(device: torch.device, minutes: float) -> Iterator[Workers]:
    """The ranks that torchrun's environment names, connected while the block runs; else one process.

    minutes: how long they wait for one that does not answer. Workers are told at once when a process ends.
    A rank other than the first leaves the block silently (SystemExit) where the first tells that it was stopped.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield Workers()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _connect(device, rank, size, datetime.timedelta(minutes=minutes))
    try:
        yield Workers(rank, size)
    except KeyboardInterrupt as interrupt:
        if rank == 0:
            raise
        raise SystemExit(interrupted(interrupt)) from interrupt
    finally:
        dist.destroy_process_group()
        # Caches of a sharded model keep the group all the same: its threads get time to put their last tensors away
        time.sleep(_LAST_TENSORS)


def _connect(device: torch.device, rank: int, size: int, patience: datetime.timedelta) -> None:
    """Make the process group of this rank and the others; patience: of whatever they do together later."""
    # What imports it later makes the group a default argument there, so that it outlives destroy_process_group(): its
    # threads run on while Python ends, and one that then wants Python's lock aborts the process. It takes seconds, in
    # which the others would wait for this rank in C++: so it comes before they have met
    from torch.distributed.nn import functional  # noqa: F401

    to_join = min(patience, _PATIENCE_TO_JOIN)
    with ending_at_once():  # another machine may never come
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=to_join))
    store = store_of_attempt(store, rank, size, to_join)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store.set_timeout(_PATIENCE_TO_CONNECT)
    try:
        with ending_at_once():  # a rank that was stopped after it had answered never comes
            dist.init_process_group(backend, timeout=_PATIENCE_TO_CONNECT, store=store, rank=rank, world_size=size)
            if device.type == "cuda":  # NCCL connects when it is first needed
                dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
                torch.cuda.synchronize(device)
    except RuntimeError as error:
        if re.search("connection was likely closed|closed by peer|reset by peer", str(error), re.IGNORECASE):
            ignore_repeats()
            raise SystemExit(LOST_PEER) from error
        if not _is_timeout(error):
            raise
        raise UserError(
            f"another rank has joined, but not connected for {_PATIENCE_TO_CONNECT.seconds} s: look at its machine's "
            "output, and run the same command again"
        ) from error
    store.set_timeout(patience)
    dist.distributed_c10d._set_pg_timeout(patience)


def device_of_rank(device: torch.device) -> torch.device:
    """The device of this process: with several ranks a GPU each.

    Raises UserError where a machine has fewer GPUs than ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type != "cuda" or "WORLD_SIZE" not in os.environ:
        return device
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{local_rank + 1} workers were started on a machine with {torch.cuda.device_count()} GPUs: give torchrun "
            "--nproc-per-node as many as there are GPUs"
        )
    return torch.device("cuda", local_rank)


def cores_of_rank() -> int:
    """Cores for each of this machine's ranks, at least 1."""
    return max(1, allowed_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def share_of_rows(rank: int, size: int, batch: int, batches: int, rows: int) -> tuple[int, int]:
    """Return the rows [begin, end) of batch number `batch` of an update's `batches` batches that a rank computes.

    An update is cut into `size` equal parts: 2 ranks take the halves of 1 batch, or 2 of 4 batches each, and of 3
    batches one and a half. Every row is of exactly one rank.
    """
    begin, end = (min(max(part * batches - batch * size, 0), size) for part in (rank, rank + 1))
    return begin * rows // size, end * rows // size


def last_batch(rank: int, size: int, batches: int) -> int:
    """The number of the last of an update's batches that a rank computes rows of."""
    return -(-(rank + 1) * batches // size) - 1


@contextmanager
def _ending_with_peers() -> Iterator[None]:
    """A connection that breaks means that another rank has ended, with its own message: this one has none to add.

    UserError where a rank has not answered in time: it tells nothing itself.
    """
    try:
        yield
    except RuntimeError as error:
        if _is_timeout(error):
            raise UserError(
                "another rank has not answered for --rank-timeout-minutes: it hangs, or takes that long to validate or "
                "to save; look at its machine, and run the same command again to go on from the last checkpoint"
            ) from error
        ignore_repeats()  # the launcher's SIGTERM, which comes when it has noticed the other one's end too
        raise SystemExit(LOST_PEER) from error


def _is_timeout(error: RuntimeError) -> bool:
    return re.search("timed? ?out", str(error), re.IGNORECASE) is not None
