"""Connections: how many there may be, and how long each may take to send a request and to read the answer.

A connection counts from accept() until it is closed, also one that says nothing. Beyond the limit it is answered with
503 and closed at once, so that descriptors never run out. Of each request the time of its first byte is kept: the
application (app.py) answers until a deadline that counts from there, and a client that has not read its answer soon
after is cut off.
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

_DETAIL = b'{"detail": "too many connections are open: ask again later"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_DETAIL), _DETAIL)
)
_SPARE_DESCRIPTORS = 64
"""For workers that take another's place, and files that are read for a moment."""


class Listener(socket.socket):
    """A socket that takes no more connections than it may, and answers the others with 503."""

    most = 1
    """Connections that may be open."""
    count = 0
    """Connections that are open."""
    on_refusal: Callable[[], None] = staticmethod(lambda: None)
    """Called when a connection was refused."""

    def accept(self) -> tuple[socket.socket, Any]:
        """A connection; ConnectionAbortedError, after which asyncio goes on, where there are too many."""
        connection, address = super().accept()
        if self.count < self.most:
            self.count += 1
            return connection, address
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(_BUSY)
            connection.recv(1 << 16)  # unread, it would have the answer thrown away
        self.on_refusal()
        raise ConnectionAbortedError


def connections_that_fit(wanted: int) -> int:
    """Raise the limit of descriptors to what the system allows; return how many of the wanted connections it has room
    for, beside what is open. UserError for none."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = soft - len(os.listdir("/dev/fd")) - _SPARE_DESCRIPTORS
    if room < 1:
        raise UserError(f"{soft:,} open files are allowed, too few for connections: raise the limit (ulimit -n)")
    return min(wanted, room)


def server(app: "App", listener: Listener, limits: Limits) -> uvicorn.Server:
    """A server of this application, to be run with sockets=[listener]."""
    listener.most, listener.on_refusal = limits.connections, app.metrics.connections_refused.inc
    app.metrics.connections.set_function(lambda: listener.count)
    config = uvicorn.Config(
        app.starlette,
        log_level="error",
        lifespan="off",
        loop="asyncio",  # uvloop accepts connections by itself
        ws="none",
        timeout_graceful_shutdown=int(limits.seconds + limits.head_seconds) + 1,
        server_header=False,
        http=_protocol(listener, limits),
    )
    return uvicorn.Server(config)


def _protocol(listener: Listener, limits: Limits) -> type[H11Protocol]:
    """HTTP/1.1 with a limit for every phase of a connection. uvicorn limits only the pause between two requests.

    The head of a request must come within limits.head_seconds. From its first byte on, which is the `begun` of the
    request's state by the loop's clock, there are limits.seconds for the request, and limits.head_seconds more until
    its answer has been read.
    """

    class Timed(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.app_state = {**self.app_state}
            self._timer: Any = None
            self._answering: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # writing pauses while anything is unsent
            self._watch()

        def data_received(self, data: bytes) -> None:
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                self.app_state["begun"] = self.loop.time()
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            self.app_state["begun"] = self.loop.time()  # of a request that came with the bytes of the last one
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
            """Set the timer anew where another request begins to be read, or to be answered."""
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
