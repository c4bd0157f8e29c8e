"""The processes of `fasttfm serve --workers`: a first one that reads the weights, and the workers that it forks.

All workers read the pages of the first one. It forks another for each that ends, tells the server on `control`, and
ends when nobody listens there any more; a worker ends with the connection to the server. Signals that end programs are
left to the server.
"""

import os
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, NoReturn

from fasttfm.decoding.search import prepare
from fasttfm.decoding.translator import Translation, Translator
from fasttfm.processes import end_with, read_shared
from fasttfm.serving.engine import Engine, settle
from fasttfm.serving.queue import Answer


def begin(weights: int, control_descriptor: int, count: int) -> None:
    """The first process. weights: descriptor of a file with the translators by name, as torch saves them.

    It tells ("begun", number, pid), followed by the descriptor of the connection to that worker; ("ended", number,
    status of os.wait); ("failed", line) where it cannot begin.
    """
    control = Connection(control_descriptor)
    try:
        translators = read_shared(weights)
        for each in translators.values():
            prepare(each.model)
        settle()
        numbers = {_fork(translators, control, number, count): number for number in range(count)}
    except Exception as error:
        control.send(("failed", " ".join(str(error).splitlines())))
        return
    with suppress(OSError):  # the server has ended, and the workers with it
        while True:
            pid, status = os.wait()
            number = numbers.pop(pid)
            control.send(("ended", number, status))
            numbers[_fork(translators, control, number, count)] = number


def _fork(translators: Mapping[str, Translator], control: Connection, number: int, count: int) -> int:
    """The process id of a new worker, of which the server has been told."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        os.close(control.fileno())
        _work(translators, Connection(theirs.detach()), count)
    theirs.close()
    control.send(("begun", number, pid))
    send_handle(control, ours.fileno(), os.getppid())
    ours.close()
    return pid


class _Told:
    """Tells the server what the engine does; it counts its queue itself."""

    def __init__(self, server: Connection) -> None:
        self.server = server
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        with self._lock:
            try:
                self.server.send(message)
            except OSError:
                os._exit(0)

    def waiting(self, sentences: int) -> None:
        """See Counts."""

    def step(self, seconds: float, together: int, ended: int, tokens: int) -> None:
        """See Counts."""
        self.send("step", seconds, together, ended, tokens)

    def answer(self, number: int, answer: Future[list[Translation]]) -> None:
        error = CancelledError("nobody waits for it any more") if answer.cancelled() else answer.exception()
        if error is None:
            self.send("answer", number, answer.result(), None)
        else:
            self.send("answer", number, None, " ".join(str(error).splitlines()))


def _work(translators: Mapping[str, Translator], server: Connection, count: int) -> NoReturn:
    """A worker: translates what it is sent until the server hangs up."""
    threading.Thread(target=end_with, args=(server.fileno(),), daemon=True).start()
    told = _Told(server)
    engine = Engine(translators, told, queue=sys.maxsize, workers=count)
    answers: dict[int, Answer] = {}
    while True:
        try:
            kind, number, *values = server.recv()
        except (EOFError, OSError):
            os._exit(0)
        if kind == "abandon":
            if number in answers:
                answers[number].abandon()
            continue
        (answer,) = engine.submit([replace(*values, answer=Answer())])
        answers = {key: each for key, each in answers.items() if not each.done()} | {number: answer}
        answer.add_done_callback(partial(told.answer, number))
