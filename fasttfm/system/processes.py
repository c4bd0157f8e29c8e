"""A pool of worker processes that share one copy of a model, for search, servers and subword sampling.

Python threads compete for the interpreter; processes synchronize once per batch. The pool starts a fork server with
`python -c`, because a multi-threaded program must not fork. It maps the weights, prepares them, and forks the workers,
which share its pages, and replacements for workers that end. A server derives its own pool with several calls per
worker.

Workers watch the socket to their program and end with it. Stopping signals are left to the program.
"""

import itertools
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import IO, Any, NoReturn

import torch
from torch import nn

from fasttfm.errors import ENDING_SIGNALS, UserError
from fasttfm.system.children import calling, signal_name

Call = tuple[Any, ...]
"""Arguments of a function after the model."""
_numbers = itertools.count()


class Worker:
    """A worker process and its pending calls."""

    def __init__(self, number: int, pid: int, connection: Connection) -> None:
        self.number, self.pid, self.connection = number, pid, connection
        self.asked: dict[int, Any] = {}
        """Call number -> receiver of its result."""
        self._sending = threading.Lock()

    def ask(self, receiver: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Call function(model, *arguments) in the worker; WorkerPool.answered() passes the result to `receiver`."""
        number = next(_numbers)
        self._send(number, function, arguments)
        self.asked[number] = receiver

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call function(model, *arguments) in the worker, without a result."""
        self._send(None, function, arguments)

    def _send(self, number: int | None, function: Callable[..., Any], arguments: Call) -> None:
        call = ForkingPickler.dumps((function, arguments))
        with self._sending, suppress(OSError):  # the listener thread handles workers that have ended
            self.connection.send(number)
            self.connection.send_bytes(call)


class WorkerPool:
    """Processes that compute with one model, or another value; started on first use.

    They end with close(), the `with` block, the program, or a failure, and are restarted on the next use. The workers
    keep the weights they started with, so the model must not change meanwhile.

    A worker has one call at a time, and its end is a failure. Derived classes may override hand_out(), answered(),
    told() and lost(), which are called by one thread at a time, holding `changed`.
    """

    def __init__(
        self,
        model: Any,
        count: int,
        *,
        remedy: str,
        prepare: Callable[[Any], None] | None = None,
        begin: Callable[[Any, Callable[..., None]], Any] | None = None,
        least_work: float = 0,
    ) -> None:
        """model: a module on a CPU, or another picklable value. remedy: advice after a process was killed.

        prepare(model): called once in the fork server, shared by all workers; a module-level function. begin(model,
        tell): called once in each worker; its result replaces the model, and tell() calls told() here. least_work: work
        that justifies starting the workers, in the caller's unit. ValueError for fewer than one worker.
        """
        if count < 1:
            raise ValueError(f"{count} workers: must be at least 1")
        self.model = model
        self.count = count
        self.least_work = least_work
        self.remedy = remedy
        self.changed = threading.Condition()
        """The pool's lock; notified after every message."""
        self.workers: dict[Any, Worker] = {}
        """Running workers by connection."""
        self.failure: BaseException | None = None
        """Reason why the processes were ended, until it is raised."""
        self._steps = prepare, begin
        self._calls: deque[tuple] = deque()
        """Future, function and arguments of calls without a worker."""
        self._control: Connection | None = None
        """Connection to the fork server while it runs."""
        self._end: Callable[[], object] = lambda: None

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        with self.changed:
            return [each.pid for each in self.workers.values()]

    def close(self, error: BaseException | None = None) -> None:
        """Kill the processes. error: raised in pending calls."""
        with self.changed:
            self._end()
            waiting = [each for worker in self.workers.values() for each in worker.asked.values()]
            waiting += [future for future, *_ in self._calls]
            self._control = None
            self.workers.clear()
            self._calls.clear()
            for each in waiting:
                self.answered(each, None, error or UserError(f"the workers were ended: {self.remedy}"))
            self.changed.notify_all()

    def each(self, function: Callable[..., Any], calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Yields (index of the call, function(model, *call)) as calls complete; they start in order.

        function: a module-level function; its exceptions are raised here, and UserError if a worker was killed.
        Thread-safe.
        """
        control = None
        try:
            with self.changed:
                if self.failure is not None:
                    raise self.failure
                control = self.started()
                futures: dict[Future, int] = {Future(): number for number in range(len(calls))}
                self._calls += [(future, function, *calls[number]) for future, number in futures.items()]
                self.hand_out()
            for done in as_completed(futures):
                yield futures[done], done.result()
        except BaseException:
            with self.changed:
                if self._control in (None, control):  # else another thread has restarted them
                    self.close()  # abandon unfinished calls
                    self.failure = None
            raise

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(model, *arguments) in a free worker; raises the errors of each()."""
        ((_, result),) = self.each(function, [arguments])
        return result

    def hand_out(self) -> None:
        """Assign waiting calls to free workers."""
        for worker in self.workers.values():
            if self._calls and not worker.asked:
                worker.ask(*self._calls.popleft())

    def answered(self, receiver: Any, result: Any, error: BaseException | None) -> None:
        """Pass a result or an error to the receiver of a call."""
        if error is None:
            receiver.set_result(result)
            return
        if isinstance(error, UserError):
            error.__cause__ = None  # hide the worker's traceback
        receiver.set_exception(error)

    def told(self, *values: Any) -> None:
        """Handle the arguments of a worker's tell()."""

    def lost(self, worker: Worker, how: str) -> None:
        """Handle the end of a worker, which is being replaced. how: such as `was ended by SIGKILL`."""
        error = UserError(f"worker {worker.number} {how}: {self.remedy}")
        for each in worker.asked.values():
            self.answered(each, None, error)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the processes; `error` is raised in pending calls, or else in the next one."""
        with self.changed:
            self.failure = error
            self.close(error)

    def started(self) -> Connection:
        """The connection to the fork server, which is started unless it runs; the caller holds the lock."""
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        with theirs, _in_memory((self.model, *self._steps)) as file:
            descriptors = [file.fileno(), theirs.fileno()]
            process = subprocess.Popen(
                calling(_serve_forks, *descriptors, self.count),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # own process group: no Ctrl-C from the terminal, and killed as a group
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control = control = Connection(ours.detach())
        self._end = weakref.finalize(self, _end_group, process)
        try:
            while len(self.workers) < self.count:
                self._hear(control)
        except (EOFError, OSError):
            status = process.wait()
            how = f"by {signal_name(-status)}" if status < 0 else f"with status {status}"
            self.close()
            raise UserError(f"the workers ended {how} before they had started: {self.remedy}") from None
        except BaseException:
            self.close()
            raise
        threading.Thread(target=_listen, args=(weakref.ref(self), control), name="workers", daemon=True).start()
        return control

    def take(self, control: Connection, ready: Sequence[Any]) -> list[Any]:
        """Handle a message from each ready connection; returns the connections to wait for, none after the end."""
        with self.changed:
            for connection in ready:
                if self._control is not control:
                    return []
                if connection is control:
                    self._hear(control)
                elif connection in self.workers:
                    self._take(control, self.workers[connection])
                self.hand_out()
                self.changed.notify_all()
            return [control, *self.workers]

    def _take(self, control: Connection, worker: Worker) -> None:
        try:
            number, result, error = worker.connection.recv()
        except (EOFError, OSError):
            self._hear(control)  # the worker has ended; the fork server reports how
            return
        if number is None:
            self.told(*result)
        else:
            self.answered(worker.asked.pop(number), result, error)

    def _hear(self, control: Connection) -> None:
        """Handle a message from the fork server."""
        kind, number, value = control.recv()
        if kind == "failed":
            raise value
        if kind == "begun":
            connection = Connection(recv_handle(control))
            self.workers[connection] = Worker(number, value, connection)
            return
        (worker,) = (each for each in self.workers.values() if each.number == number)
        del self.workers[worker.connection]
        how = f"was ended by {signal_name(os.WTERMSIG(value))}" if os.WIFSIGNALED(value) else "ended"
        self.lost(worker, how)


def _listen(pool: "weakref.ref[WorkerPool]", control: Connection) -> None:
    """The listener thread of a pool: results, ended workers, new workers. Does not keep the pool alive."""
    ready: list[Any] = []
    while (here := pool()) is not None:
        try:
            connections = here.take(control, ready)
        except (EOFError, OSError):
            here.fail(UserError(f"the fork server of the workers was killed: {here.remedy}"))
            return
        except BaseException as error:
            here.fail(error)
            return
        if not connections:
            return
        del here
        ready = wait(connections)


def can_fork(model: nn.Module) -> bool:
    """Whether the system supports workers and the model is on a CPU."""
    return hasattr(os, "fork") and all(each.device.type == "cpu" for each in model.parameters())


def _end_group(process: subprocess.Popen) -> None:
    """Kill a session leader and its forks."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _in_memory(value: Any) -> IO[bytes]:
    """An unnamed file with torch.save(value)."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("fasttfm-weights"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    torch.save(value, file)
    file.flush()
    return file


def _described(error: BaseException) -> ExceptionWithTraceback:
    """A picklable form of an error, whose cause shows the worker's traceback."""
    described = ExceptionWithTraceback(error, error.__traceback__)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        described.exc = RuntimeError(f"{type(error).__name__}: {error}")
    return described


# In the worker processes


def _serve_forks(shared: int, control_descriptor: int, count: int) -> None:
    """The fork server. shared: descriptor of a file with (value, prepare, begin).

    Sends ("begun", number, pid), followed by the descriptor of the connection to that worker; ("ended", number, status
    of os.wait); ("failed", 0, error) if it cannot start. Ends when the connection is closed.
    """
    control = Connection(control_descriptor)
    try:
        for signal_number in (signal.SIGINT, *ENDING_SIGNALS):
            signal.signal(signal_number, signal.SIG_IGN)
        torch.set_num_threads(1)
        # mmap: unmodified pages are shared. weights_only=False is safe, because the program has just written the file
        value, prepare, begin = torch.load(f"/dev/fd/{shared}", mmap=True, weights_only=False)
        if prepare is not None:
            prepare(value)
        numbers = {_fork(value, begin, control, number): number for number in range(count)}
    except BaseException as error:
        with suppress(OSError):
            control.send(("failed", 0, _described(error)))
        return
    with suppress(OSError):  # the program and the workers have ended
        while True:
            pid, status = os.wait()
            number = numbers.pop(pid)
            control.send(("ended", number, status))
            numbers[_fork(value, begin, control, number)] = number


def _fork(value: Any, begin: Callable[..., Any] | None, control: Connection, number: int) -> int:
    """Fork a worker and report it to the program; returns its process id."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            ours.close()
            os.close(control.fileno())
            _work(value, begin, Connection(theirs.detach()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    control.send(("begun", number, pid))
    send_handle(control, ours.fileno(), os.getppid())
    ours.close()
    return pid


def _work(value: Any, begin: Callable[..., Any] | None, program: Connection) -> NoReturn:
    """The main loop of a worker, until its program ends.

    A function may return a Future, whose result is sent when it is done; the next call runs meanwhile.
    """
    threading.Thread(target=_end_with, args=(program.fileno(),), daemon=True).start()
    sending = threading.Lock()

    def send(*message: Any) -> None:
        try:
            with sending:
                program.send(message)
        except OSError:
            os._exit(0)

    def answer(number: int | None, compute: Callable[[], Any]) -> None:
        try:
            result = compute()
            if isinstance(result, Future):
                result.add_done_callback(lambda done: answer(number, done.result))
            elif number is not None:
                send(number, result, None)
        except BaseException as error:
            send(number, None, _described(error))

    def call() -> Any:
        function, arguments = program.recv()
        return function(value, *arguments)

    if begin is not None:
        value = begin(value, lambda *values: send(None, values, None))
    while True:
        try:
            number = program.recv()
        except (EOFError, OSError):
            os._exit(0)
        answer(number, call)


def _end_with(connection: int) -> None:
    """End this process as soon as the other end of a connection is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    poll.poll()
    os._exit(0)
