"""Processes that draw the segmentations of windows of pairs, beside the training that needs them.

Drawing is Python: a thread of the training's process would take turns with what launches its kernels. A process gets
the vocabularies once, then a window at a time through a pipe, and ends with its program, however that ends, because its
input does.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any, cast

from fasttfm.children import calling
from fasttfm.data.sampled_windows import Packed, PairSampler, Window
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.errors import UserError


class SamplingProcesses:
    """So many processes, which start when the first windows are asked for, and end with this object."""

    def __init__(self, tokenizers: tuple[Tokenizer, Tokenizer], amount: float, count: int) -> None:
        """tokenizers and amount: as PairSampler takes them. count: at least 1."""
        source, target = tokenizers
        self._given = [source.model, None if target is source else target.model, amount]
        self._threads = ThreadPoolExecutor(count, "sampling")
        self._idle: SimpleQueue[subprocess.Popen | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(None)  # not started yet

    def pack(self, window: Window) -> Future[Packed]:
        """PairSampler.pack(window), computed by the next process that is free."""
        return self._threads.submit(self._ask, window)

    def _ask(self, window: Window) -> Packed:
        process = self._idle.get()
        try:
            if process is None:
                process = self._start()
            pickle.dump(window, cast(IO[bytes], process.stdin), pickle.HIGHEST_PROTOCOL)
            cast(IO[bytes], process.stdin).flush()
            packed, failure = pickle.load(cast(IO[bytes], process.stdout))
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise UserError(
                "a process that draws segmentations was ended: run the same command again, which goes on from the last "
                "checkpoint"
            ) from error
        finally:
            self._idle.put(process)
        if failure is not None:
            raise RuntimeError(f"a process that draws segmentations failed:\n{failure}")
        return packed

    def _start(self) -> subprocess.Popen:
        process = subprocess.Popen(
            calling(serve),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the program's
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _end, process)
        pickle.dump(self._given, cast(IO[bytes], process.stdin))
        return process


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            cast(IO[bytes], pipe).close()


def serve() -> None:
    """Read windows from the process's input and write what comes of them to its output."""
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    source, target, amount = pickle.load(given)
    first = Tokenizer(source)
    sampler = PairSampler((first, first if target is None else Tokenizer(target)), amount)
    answer: tuple[Any, str | None]
    with suppress(EOFError, BrokenPipeError):
        while True:
            window = pickle.load(given)
            try:
                answer = sampler.pack(window), None
            except Exception:
                answer = None, traceback.format_exc()
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
