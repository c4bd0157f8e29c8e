"""Memory of the ranks of sharded training, by their number, on one machine.

    python -m benchmarks.ranks

Ranks are forked from a process that has loaded PyTorch, and exchange over gloo. Each makes two updates of the base
model with two layers a side and 8,000 subwords: Adam, float32, two short pairs. State: a rank's weights and moments.
Peak: sampled memory that it shares with no process, with freed blocks returned to the system. The largest of the ranks.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import command
from benchmarks.measure.machine import machine_name
from fasttfm.cli.parser import InRange
from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import ParallelTokens
from fasttfm.models import Transformer
from fasttfm.system.children import end_with_parent
from fasttfm.training.sharding import local
from fasttfm.training.updates import Updates
from fasttfm.training.workers import joined

_CPU = torch.device("cpu")
_MMAP_THRESHOLD = -3
"""Parameter of mallopt() in glibc's malloc.h."""


def private_bytes(pid: int | None) -> int:
    """Memory of a process that no other shares; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def _train(rank: int, size: int, port: int, model: Transformer, states: Any) -> None:
    """Make the updates of one rank and write the bytes of its state to states[rank]."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python would act on it after gloo's wait
    end_with_parent()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in address.items()})
    side = list(np.random.default_rng(0).integers(4, model.config.vocab_size, (2 * size, 20)))  # two pairs a rank
    batches = TokenBatches(ParallelTokens.from_lists(side, side), 64 * size)
    with joined(_CPU, minutes=10) as workers:
        updates = Updates(model.train(), batches, TrainingConfig(shard=True), _CPU, workers)
        for _ in range(2):
            updates.perform()
        updates.close()
        held = [*model.parameters(), *updates.tensors().values()]
        states[rank] = sum(local(each).nbytes for each in held if each.ndim)
        workers.wait()


def measured(size: int) -> dict[str, Any]:
    """Bytes of state and of peak memory. Raises SystemExit if a rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = Transformer.from_preset("paper-base", vocab_size=8_000, encoder_layers=2, decoder_layers=2)
    fork, peaks = multiprocessing.get_context("fork"), [0] * size
    states: Any = fork.Array("Q", size)
    ranks = [
        fork.Process(target=_train, args=(rank, size, port, model, states), daemon=True) for rank in range(size)
    ]  # daemon: an interruption does not wait for them
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        peaks = [max(peak, private_bytes(process.pid)) for peak, process in zip(peaks, ranks)]
        time.sleep(0.1)
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"benchmarks: ranks of {size} ended with {[process.exitcode for process in ranks]}")
    return {"ranks": size, "state": max(states[:]), "peak": max(peaks)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks.ranks", __doc__)
    parser.add_argument("--ranks", type=InRange(1, 256), nargs="+", default=[1, 4, 16, 64], help="(default: 1 4 16 64)")
    args = parser.parse_args(argv)
    command.writable(args.results, "--results")
    torch.set_num_threads(1)  # a process with threads must not fork
    for module in ("numba", "torch.distributed.nn.functional", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(module)  # once, not in every rank
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    rows = []
    for size in args.ranks:
        rows.append(measured(size))
        print("{ranks} ranks: state {state:,} bytes, peak {peak:,}".format(**rows[-1]), flush=True)
    fields = {"preset": "paper-base", "measured": rows}
    command.keep(args.results, "ranks", key=lambda record: machine_name(record["machine"]), **fields)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
