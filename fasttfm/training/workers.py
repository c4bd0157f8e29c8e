"""Ranks of data-parallel training, started by torchrun.

Every rank holds the whole model. Ranks share the batches of an update, sum their gradients and take the same step, so
all hold bitwise equal weights. Only rank 0 accesses the model directory; the others receive weights and state from it
and need only the prepared data. Everything but gradients is exchanged over gloo, which runs on every machine.
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

from fasttfm.errors import LOST_PEER, UserError, interrupted, is_out_of_memory
from fasttfm.system.machine import allowed_cores
from fasttfm.system.signals import ending_at_once, ignore_repeats
from fasttfm.training.rendezvous import store_of_attempt

_PATIENCE_TO_JOIN = datetime.timedelta(minutes=30)
"""Maximum time for ranks to join at the start."""
_PATIENCE_TO_CONNECT = datetime.timedelta(seconds=60)
"""Maximum time to connect, once all ranks have joined."""
_LAST_TENSORS = 0.1
"""Seconds for gloo's threads to finish; microseconds suffice on an idle machine."""


class Workers:
    """The ranks of a run; for a single process every method is a no-op."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        """Number of ranks."""
        self._parent = os.getppid()

    @property
    def is_first(self) -> bool:
        """True for the rank that validates, logs and saves."""
        return self.rank == 0

    @property
    def is_orphaned(self) -> bool:
        """True if the launcher was killed."""
        return self.size > 1 and os.getppid() != self._parent

    def wait(self) -> None:
        """Barrier: wait for all ranks."""
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Maximum of each value over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks in place, on its device; every rank gets the same bits."""
        if self.size > 1:
            with _ending_with_peers():
                dist.all_reduce(tensor)

    def begin_to_add_up(self, tensor: Tensor) -> Callable[[], None]:
        """Start add_up() asynchronously; the tensor must not be used before the returned function has waited."""
        with _ending_with_peers():
            work = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with _ending_with_peers():
                work.wait()

        return wait

    def gather(self, value: Any) -> list[Any]:
        """All-gather a picklable object from each rank, in rank order."""
        return [self.broadcast(value, source) for source in range(self.size)]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Broadcast a picklable object from one rank; values of other ranks are ignored."""
        if self.size == 1:
            return value
        values = [value]
        with _ending_with_peers():
            dist.broadcast_object_list(values, src=source, device=torch.device("cpu"))
        return values[0]

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Broadcast rank 0's tensors by name, to the CPU; other ranks pass None."""
        if self.size == 1:
            assert tensors is not None
            return tensors
        kinds = None if tensors is None else {name: (each.shape, each.dtype) for name, each in tensors.items()}
        shared = {}
        for name, (shape, dtype) in self.broadcast(kinds).items():
            if tensors is None:
                tensor = torch.empty(shape, dtype=dtype, device="cpu")
            else:
                tensor = tensors[name].detach().cpu().contiguous()
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
"""A single process."""


@contextmanager
def joined(device: torch.device, minutes: float) -> Iterator[Workers]:
    """Connect the ranks of torchrun's environment within the block; without torchrun, a single process.

    minutes: timeout for a rank that does not answer; one that ends is noticed at once. On KeyboardInterrupt ranks other
    than the first exit silently (SystemExit), because rank 0 prints the message.
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
        # caches of a sharded model keep the group alive: let its threads release their last tensors
        time.sleep(_LAST_TENSORS)


def _connect(device: torch.device, rank: int, size: int, patience: datetime.timedelta) -> None:
    """Create the process group; patience: timeout of later collectives."""
    # An import of this after the group exists makes it a default argument, so that it outlives destroy_process_group()
    # and its threads may abort the process at exit. The import takes seconds, so it precedes the rendezvous.
    from torch.distributed.nn import functional  # noqa: F401

    to_join = min(patience, _PATIENCE_TO_JOIN)
    try:
        with ending_at_once():  # another machine may never join
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=to_join))
    except (ValueError, RuntimeError) as error:  # no address, or nothing that listens there
        reason = str(error).splitlines()[0]
        raise UserError(f"{size} ranks cannot meet ({reason}): start them by torchrun, or unset WORLD_SIZE") from error
    store = store_of_attempt(store, rank, size, to_join)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store.set_timeout(_PATIENCE_TO_CONNECT)
    try:
        with ending_at_once():  # a rank that was stopped after it had answered never comes
            dist.init_process_group(backend, timeout=_PATIENCE_TO_CONNECT, store=store, rank=rank, world_size=size)
            if device.type == "cuda":  # NCCL connects lazily
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
    """The device of this rank: one GPU each. Raises UserError if a machine has fewer GPUs than ranks."""
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
    """Cores per rank on this machine, at least 1."""
    return max(1, allowed_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def share_of_rows(rank: int, size: int, batch: int, batches: int, rows: int) -> tuple[int, int]:
    """Rows [begin, end) that a rank computes of batch `batch`, one of `batches` in an update.

    An update is split into `size` equal parts: 2 ranks take one half of 1 batch each, or 2 of 4 batches, or one and a
    half of 3. Every row belongs to exactly one rank.
    """
    begin, end = (min(max(part * batches - batch * size, 0), size) for part in (rank, rank + 1))
    return begin * rows // size, end * rows // size


def last_batch(rank: int, size: int, batches: int) -> int:
    """Index of the last batch of an update in which a rank has rows."""
    return -(-(rank + 1) * batches // size) - 1


@contextmanager
def _ending_with_peers() -> Iterator[None]:
    """Exit silently if a connection breaks: another rank has ended, with a message of its own.

    Raises UserError for a rank that does not answer in time.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):  # also of an earlier kernel
            raise
        if _is_timeout(error):
            raise UserError(
                "another rank has not answered for --rank-timeout-minutes: it hangs, or takes that long to validate or "
                "to save; look at its machine, and run the same command again to resume from the last checkpoint"
            ) from error
        ignore_repeats()  # the launcher sends SIGTERM once it notices
        raise SystemExit(LOST_PEER) from error


def _is_timeout(error: RuntimeError) -> bool:
    return re.search("timed? ?out", str(error), re.IGNORECASE) is not None
