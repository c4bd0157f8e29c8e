"""Worker processes, one a core, that share one copy of a model: for searches, servers and sampling.

Python threads compete for the interpreter; processes wait for one another once a batch. The first process is a fresh
one (`python -c`, because a program with threads must not fork). It maps the weights, prepares them, and forks the
workers, which read the same pages, and a new one for each that ends. WorkerPool is the pool for all uses; a server
derives its own, with many calls per worker.

A worker watches the socket to its program and ends with it. Signals that end programs are left to the program.
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
"""Arguments of a function, after the model."""
_numbers = itertools.count()


class Worker:
    """A process, and what it has not answered."""

    def __init__(self, number: int, pid: int, connection: Connection) -> None:
        self.number, self.pid, self.connection = number, pid, connection
        self.asked: dict[int, Any] = {}
        """Number of a call -> who waits for it."""
        self._sending = threading.Lock()

    def ask(self, waiting: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it compute function(model, *arguments); WorkerPool.answered() gives the answer to `waiting`."""
        number = next(_numbers)
        self._send(number, function, arguments)
        self.asked[number] = waiting

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have it call function(model, *arguments)."""
        self._send(None, function, arguments)

    def _send(self, number: int | None, function: Callable[..., Any], arguments: Call) -> None:
        call = ForkingPickler.dumps((function, arguments))
        with self._sending, suppress(OSError):  # the thread that listens hears of one that has ended
            self.connection.send(number)
            self.connection.send_bytes(call)


class WorkerPool:
    """So many processes that compute with one model, or another value. They start when they are first needed.

    close(), the end of a `with` block and the end of the program end them. After a failure they are ended as well, and
    started anew when they are needed again. The model must not change in between: the workers go on with its weights as
    they were.

    A worker has one call at a time, and its end is a failure. A derived class may hand out and go on otherwise:
    hand_out(), answered(), told() and lost() are called by one thread at a time, which holds `changed`.
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
        """model: a module on a CPU, or what else pickle takes. remedy: what a user can do after a process was killed.
        prepare(model): what the first process does before it forks, for all workers to keep; a function of a module.
        begin(model, tell): what a worker's functions get in place of the model; tell() passes its arguments to told().
        least_work: the work from which on starting them is worthwhile, in the caller's unit. ValueError for fewer than
        one worker."""
        if count < 1:
            raise ValueError(f"{count} workers: give at least 1")
        self.model = model
        self.count = count
        self.least_work = least_work
        self.remedy = remedy
        self.changed = threading.Condition()
        """The lock of the pool; notified of every message."""
        self.workers: dict[Any, Worker] = {}
        """Running workers by their connections."""
        self.failure: BaseException | None = None
        """Why the processes were ended, until somebody was told."""
        self._steps = prepare, begin
        self._calls: deque[tuple] = deque()
        """Future, function and arguments of what no worker has been asked yet."""
        self._control: Connection | None = None
        """To the first process, while it runs."""
        self._end: Callable[[], object] = lambda: None

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        with self.changed:
            return [each.pid for each in self.workers.values()]

    def close(self, error: BaseException | None = None) -> None:
        """Ends the processes, whatever they are doing. error: what those who wait are told."""
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
        """(number of the call, function(model, *call)) for every call, as they are finished; begun in their order.

        function: of a module, so that its name says which it is. What it raises is raised; UserError for a worker that
        was killed. Threads may call at once.
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
                if self._control in (None, control):  # else another thread has started them anew
                    self.close()  # what is still being computed is nobody's any more
                    self.failure = None
            raise

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(model, *arguments) by a worker that is free; as each()."""
        ((_, result),) = self.each(function, [arguments])
        return result

    def hand_out(self) -> None:
        """Ask workers for what waits."""
        for worker in self.workers.values():
            if self._calls and not worker.asked:
                worker.ask(*self._calls.popleft())

    def answered(self, waiting: Any, result: Any, error: BaseException | None) -> None:
        """Give an answer to who waits for it."""
        if error is None:
            waiting.set_result(result)
            return
        if isinstance(error, UserError):
            error.__cause__ = None  # the place in the worker is of no interest
        waiting.set_exception(error)

    def told(self, *values: Any) -> None:
        """Take what a worker tells."""

    def lost(self, worker: Worker, how: str) -> None:
        """A worker has ended, as the words `how` say; another takes its place."""
        error = UserError(f"worker {worker.number} {how}: {self.remedy}")
        for each in worker.asked.values():
            self.answered(each, None, error)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the processes; who waits is told, or else who asks next."""
        with self.changed:
            self.failure = error
            self.close(error)

    def started(self) -> Connection:
        """The connection to the first process, which is started unless it runs; the lock is held."""
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        with theirs, _in_memory((self.model, *self._steps)) as file:
            descriptors = [file.fileno(), theirs.fileno()]
            process = subprocess.Popen(
                calling(_first, *descriptors, self.count),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a group of their own: Ctrl-C is the program's, and they can be ended at once
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control = control = Connection(ours.detach())
        self._end = weakref.finalize(self, _end_group, process)
        try:
            while len(self.workers) < self.count:
                self._hear(control)
        except (EOFError, OSError):
            status = process.wait()
            what = f"by {signal_name(-status)}" if status < 0 else f"with status {status}"
            self.close()
            raise UserError(f"the workers ended {what} before they had begun: {self.remedy}") from None
        except BaseException:
            self.close()
            raise
        threading.Thread(target=_listen, args=(weakref.ref(self), control), name="workers", daemon=True).start()
        return control

    def take(self, control: Connection, ready: Sequence[Any]) -> list[Any]:
        """Take a message of each connection that is ready; return those to wait for then, none once all have ended."""
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
            self._hear(control)  # it has ended: the first process tells how
            return
        if number is None:
            self.told(*result)
        else:
            self.answered(worker.asked.pop(number), result, error)

    def _hear(self, control: Connection) -> None:
        """Take a message of the first process."""
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
    """The thread of a pool that hears of answers, of workers that end, and of new ones; it keeps no pool alive."""
    ready: list[Any] = []
    while (here := pool()) is not None:
        try:
            connections = here.take(control, ready)
        except (EOFError, OSError):
            here.fail(UserError(f"the process that had started the workers was ended: {here.remedy}"))
            return
        except BaseException as error:
            here.fail(error)
            return
        if not connections:
            return
        del here
        ready = wait(connections)


def can_fork(model: nn.Module) -> bool:
    """Return whether this system has what workers need, and the model is on a CPU."""
    return hasattr(os, "fork") and all(each.device.type == "cpu" for each in model.parameters())


def _end_group(process: subprocess.Popen) -> None:
    """Ends a process that leads a session, with all that it has forked."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _in_memory(value: Any) -> IO[bytes]:
    """A file without a name that holds value as torch saves it."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("fasttfm-weights"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    torch.save(value, file)
    file.flush()
    return file


def _described(error: BaseException) -> ExceptionWithTraceback:
    """Return what can be sent of an error: where it arrives its cause tells the place in the worker."""
    described = ExceptionWithTraceback(error, error.__traceback__)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        described.exc = RuntimeError(f"{type(error).__name__}: {error}")
    return described


# In the processes


def _first(shared: int, control_descriptor: int, count: int) -> None:
    """The first process. shared: descriptor of a file with the value, what prepares it, and what workers make of it.

    It tells ("begun", number, pid), followed by the descriptor of the connection to that worker; ("ended", number,
    status of os.wait); ("failed", 0, what _described() returns) where it cannot begin. It ends when nobody listens.
    """
    control = Connection(control_descriptor)
    try:
        for signal_number in (signal.SIGINT, *ENDING_SIGNALS):
            signal.signal(signal_number, signal.SIG_IGN)
        torch.set_num_threads(1)
        # mapped, not read: pages that no worker writes exist once. The program wrote the file a moment ago
        value, prepare, begin = torch.load(f"/dev/fd/{shared}", mmap=True, weights_only=False)
        if prepare is not None:
            prepare(value)
        numbers = {_fork(value, begin, control, number): number for number in range(count)}
    except BaseException as error:
        with suppress(OSError):
            control.send(("failed", 0, _described(error)))
        return
    with suppress(OSError):  # the program has ended, and the workers with it
        while True:
            pid, status = os.wait()
            number = numbers.pop(pid)
            control.send(("ended", number, status))
            numbers[_fork(value, begin, control, number)] = number


def _fork(value: Any, begin: Callable[..., Any] | None, control: Connection, number: int) -> int:
    """The process id of a new worker, of which the program has been told."""
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
    """A worker: computes what it is asked until its program ends.

    A function may return a Future: its result is the answer, and the next call is computed meanwhile.
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
    """Ends this process as soon as the other end of a connection is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # hanging up is always told
    poll.poll()
    os._exit(0)
