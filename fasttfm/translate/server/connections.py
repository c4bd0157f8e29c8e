"""Connection limits: how many may be open, and how long each may take to send a request and read the response.

A connection counts from accept() until it is closed, even if it sends nothing. Beyond the limit it is answered with 503
and closed at once, so file descriptors never run out. The arrival time of each request's first byte is recorded: the
application (app.py) must answer by a deadline that starts there, and a client that has not read the response soon after
is disconnected.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fasttfm.errors import UserError
from fasttfm.translate.server.limits import Limits

if TYPE_CHECKING:
    from fasttfm.translate.server.app import App

_DETAIL = b'{"detail": "too many connections are open: retry later"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_DETAIL), _DETAIL)
)
_SPARE_DESCRIPTORS = 64
"""Reserved for replacement workers and files that are open briefly."""


class Listener(socket.socket):
    """A listening socket that answers connections beyond its limit with 503."""

    most = 1
    """Most open connections."""
    count = 0
    """Open connections."""
    on_refusal: Callable[[], None] = staticmethod(lambda: None)
    """Called for each refused connection."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; beyond the limit raise ConnectionAbortedError, which asyncio ignores."""
        connection, address = super().accept()
        if self.count < self.most:
            self.count += 1
            return connection, address
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(_BUSY)
            connection.recv(1 << 16)  # closing with unread data would discard the response
        self.on_refusal()
        raise ConnectionAbortedError


def connections_that_fit(requested: int) -> int:
    """Raise the descriptor limit as far as the system allows, and return how many of the requested connections fit
    beside the files that are open. Raises UserError if none do."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return requested
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return requested
    room = soft - len(os.listdir("/dev/fd")) - _SPARE_DESCRIPTORS
    if room < 1:
        raise UserError(f"{soft:,} open files are allowed, too few for connections: raise the limit (ulimit -n)")
    return min(requested, room)


def server(app: "App", listener: Listener, limits: Limits) -> uvicorn.Server:
    """A uvicorn server of this application, to be run with sockets=[listener]."""
    listener.most, listener.on_refusal = limits.connections, app.metrics.connections_refused.inc
    app.metrics.connections.set_function(lambda: listener.count)
    config = uvicorn.Config(
        app.starlette,
        log_level="error",
        lifespan="off",
        loop="asyncio",  # uvloop does not call accept() of a socket
        ws="none",
        timeout_graceful_shutdown=int(limits.seconds + limits.head_seconds) + 1,
        server_header=False,
        http=_protocol(listener, limits),
    )
    return uvicorn.Server(config)


def _protocol(listener: Listener, limits: Limits) -> type[H11Protocol]:
    """HTTP/1.1 with a time limit for every phase; uvicorn limits only the pause between two requests.

    The head of a request must arrive within limits.head_seconds. From its first byte (`begun` in the request's state,
    by the loop's clock) the request has limits.seconds, and its response must be read limits.head_seconds later.
    """

    class Timed(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.app_state = {**self.app_state}
            self._timer: Any = None
            self._answering: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # pause_writing() as long as anything is unsent
            self._watch()

        def data_received(self, data: bytes) -> None:
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                self.app_state["begun"] = self.loop.time()
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            self.app_state["begun"] = self.loop.time()  # for a pipelined request
            super().on_response_complete()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            listener.count -= 1
            self._timer.cancel()

        def _watch(self) -> None:
            """Restart the timer when a request starts to be read, or to be answered."""
            unsent = self.cycle is not None and (not self.cycle.response_complete or self.flow.write_paused)
            answering = self.cycle if unsent else None
            if self._timer is not None:
                if answering is self._answering:
                    return
                self._timer.cancel()
            self._answering = answering
            if answering is None:
                self._timer = self.loop.call_later(limits.head_seconds, self.transport.close)
            else:
                end = self.app_state["begun"] + limits.seconds + limits.head_seconds
                self._timer = self.loop.call_at(end, self.transport.abort)

    return Timed
