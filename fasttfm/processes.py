"""Worker processes, each on one core, with one copy of what they all need between them.

They search for translations, serve, and draw segmentations. Threads of one process hold up one another in Python, and
threads that share a product wait for one another some hundred times a token; processes wait once a batch. A model's
weights are written to memory once. A first process reads them, lays them out for its products, and forks one worker a
core, so that all workers read the same pages. It is a fresh one (`python -c`), because a program that has threads must
not fork.

A worker ends with its program, however that ends: it watches the socket that joins the two. Signals that end programs
are left to the program, which then ends its workers.
"""

import os
import pickle
import select
import signal
import socket
import subprocess
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import IO, Any, NoReturn

import torch
from torch import nn

from fasttfm.children import calling, signal_name
from fasttfm.errors import ENDING_SIGNALS, UserError

Call = tuple[Any, ...]
"""Arguments of a function, after the model."""


class WorkerPool:
    """So many processes that compute with one model, or another value. They start when they are first needed.

    close(), the end of a `with` block and the end of the program end them. After a failure they are ended as well, and
    started anew when they are needed again. The model must not change in between: the workers go on with its weights as
    they were.
    """

    def __init__(
        self,
        model: Any,
        count: int,
        *,
        remedy: str,
        prepare: Callable[[Any], None] | None = None,
        least_work: float = 0,
    ) -> None:
        """model: a module on a CPU, or what else pickle takes. remedy: what a user can do after a worker was killed.
        prepare(model): what the first process does before it forks, for all workers to keep; a function of a module.
        least_work: the work from which on starting them is worthwhile, in the caller's unit. ValueError for fewer than
        one worker."""
        if count < 1:
            raise ValueError(f"{count} workers: give at least 1")
        self.model = model
        self.count = count
        self.least_work = least_work
        self.pids: list[int] = []
        """Of the workers that run."""
        self._remedy = remedy
        self._prepare = prepare
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._ended = ""
        """Who was ended, once that is known."""
        self._end: weakref.finalize | None = None
        self._control: Connection | None = None
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        """Workers that call() may take."""

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        if self._end is not None:
            self._end()
        self._end, self._control, self.pids = None, None, []

    def each(self, function: Callable[..., Any], calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """(number of the call, function(model, *call)) for every call, as they are finished; begun in their order.

        function: of a module, so that its name says which it is. What it raises is raised; UserError for a worker that
        was killed.
        """
        started = self._started()
        threads = ThreadPoolExecutor(self.count, "calls")  # one waits for each worker
        try:
            numbers = {threads.submit(self._ask, *started, function, call): n for n, call in enumerate(calls)}
            for done in as_completed(numbers):
                yield numbers[done], done.result()
        except BaseException:
            self.close()  # what is still being computed is nobody's any more
            raise
        finally:
            threads.shutdown(cancel_futures=True)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(model, *arguments) by a worker that is free; at most `count` threads may call at once.

        Raises as each() does.
        """
        control, idle = self._started()
        try:
            return self._ask(control, idle, function, arguments)
        except BaseException:
            with self._lock:
                if self._control is control:  # else another thread has ended them
                    self.close()
            raise

    def _started(self) -> tuple[Connection, "SimpleQueue[Connection]"]:
        """The connection that tells who ends, and the workers that are free."""
        with self._lock:
            if self._end is None:
                try:
                    self._start()
                except BaseException:
                    self.close()
                    raise
            assert self._control is not None
            return self._control, self._idle

    def _ask(
        self, control: Connection, idle: "SimpleQueue[Connection]", function: Callable[..., Any], call: Call
    ) -> Any:
        worker = idle.get()
        try:
            worker.send((function, call))
            result, failure = worker.recv()
        except (EOFError, OSError):
            self._tell_who_ended(control)
        finally:
            idle.put(worker)
        if failure is not None:
            raise _with_origin(*failure)
        return result

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self.count + 1)]
        ours, theirs = zip(*pairs)
        process = start_process(serve, (self.model, self._prepare), theirs)
        control, *workers = (Connection(each.detach()) for each in ours)
        self._control, self._idle, self._ended = control, SimpleQueue(), ""
        for worker in workers:
            self._idle.put(worker)
        self._end = weakref.finalize(self, end_group, process, control, *workers)
        try:
            kind, value = control.recv()
        except (EOFError, OSError):
            status = process.wait()
            what = f"by {signal_name(-status)}" if status < 0 else f"with status {status}"
            raise UserError(f"the workers ended {what} before they had begun: {self._remedy}") from None
        if kind == "failed":
            raise _with_origin(*value)
        self.pids = value

    def _tell_who_ended(self, control: Connection) -> NoReturn:
        with self._telling:  # one thread reads it, and whoever has lost a worker says the same
            if not self._ended:
                try:
                    number, status = control.recv()
                    how = f"was ended by {signal_name(os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else "ended"
                    self._ended = f"worker {number} {how}"
                except (EOFError, OSError):
                    self._ended = "the process that had started the workers was ended"
            raise UserError(f"{self._ended}: {self._remedy}")


def can_fork(model: nn.Module) -> bool:
    """Return whether this system has what workers need, and the model is on a CPU."""
    return hasattr(os, "fork") and all(each.device.type == "cpu" for each in model.parameters())


def start_process(
    function: Callable[..., None], value: Any, sockets: Sequence[socket.socket], *arguments: Any
) -> subprocess.Popen:
    """Starts function(descriptor, *descriptors of the sockets, *arguments) in a fresh process with its own group.

    function: of a module. The first descriptor is that of a file with value, for read_shared(). The sockets are closed
    here.
    """
    with _in_memory(value) as file:
        fds = [file.fileno(), *(each.fileno() for each in sockets)]
        process = subprocess.Popen(
            calling(function, *fds, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # a group of their own: Ctrl-C is the program's, and they can be ended at once
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    for each in sockets:
        each.close()
    return process


def end_group(process: subprocess.Popen, *connections: Connection) -> None:
    """Ends a process of start_process() with all that it has forked."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for each in connections:
        each.close()


def _in_memory(value: Any) -> IO[bytes]:
    """A file without a name that holds value as torch saves it."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("fasttfm-weights"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    torch.save(value, file)
    file.flush()
    return file


class _Origin(Exception):
    """Place in a worker that an error comes from."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _with_origin(error: BaseException, origin: str) -> BaseException:
    error.__cause__ = None if isinstance(error, UserError) else _Origin(origin)
    return error


def _described(error: BaseException) -> tuple[BaseException, str]:
    """Return what can be sent of an error."""
    origin = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, origin


# In the processes


def read_shared(descriptor: int) -> Any:
    """The value of start_process(), in its process, which from now on takes one thread and no signal to end."""
    for number in (signal.SIGINT, *ENDING_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    # mapped, not read: pages that no worker writes exist once. Who has started this process wrote the file a moment ago
    return torch.load(f"/dev/fd/{descriptor}", mmap=True, weights_only=False)


def serve(weights: int, control: int, *connections: int) -> None:
    """The first process: reads the weights, forks a worker for each of the connections, tells who ends on `control`."""
    parent = Connection(control)
    pids: list[int] = []
    try:
        model, prepare = read_shared(weights)
        if prepare is not None:
            prepare(model)
        for connection in connections:
            pid = os.fork()
            if not pid:
                for other in (control, *connections):
                    if other != connection:
                        os.close(other)
                _work(model, Connection(connection))
            pids.append(pid)
    except BaseException as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        parent.send(("failed", _described(error)))
        return
    for connection in connections:
        os.close(connection)
    parent.send(("ready", pids))
    for _ in range(len(pids)):
        pid, status = os.wait()
        with suppress(OSError):
            parent.send((pids.index(pid), status))


def _work(model: Any, program: Connection) -> None:
    """A worker: computes what it is sent until its program ends."""
    threading.Thread(target=end_with, args=(program.fileno(),), daemon=True).start()
    while True:
        try:
            function, call = program.recv()
        except (EOFError, OSError):
            os._exit(0)
        except BaseException as error:
            answer: tuple[Any, Any] = (None, _described(error))
        else:
            try:
                answer = (function(model, *call), None)
            except BaseException as error:
                answer = (None, _described(error))
        try:
            program.send(answer)
        except OSError:
            os._exit(0)


def end_with(connection: int) -> None:
    """Ends this process as soon as the other end of a connection is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # hanging up is always told
    poll.poll()
    os._exit(0)
