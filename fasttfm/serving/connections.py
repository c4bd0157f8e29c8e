"""Limits of connections: who may talk to the server, and for how long a connection may say nothing.

A page of any website can send requests to a server on its reader's machine, and a name that an attacker owns can be
pointed at 127.0.0.1 (DNS rebinding). So the server answers to its own names only, and to requests of other pages only
where their origins are listed. Sources: Fetch standard, section 3.2 (Origin and CORS); RFC 9110, section 7.2 (Host).
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine, which a server that listens there alone answers to."""


class Gate:
    """Refuses requests that come by another name or from another page; answers those of listed pages as CORS asks."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str] = ()) -> None:
        """hosts: names, without port, that requests may call the server by; None for any. origins: of the pages that
        may ask besides the server's own, such as https://example.org."""
        self.app = app
        self.hosts = None if hosts is None else {each.lower() for each in hosts}
        self.origins = {each.lower().rstrip("/") for each in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if self.hosts is not None and _without_port(host) not in self.hosts:
            await _refuse(f"this server does not answer to the name {host!r}: see --allow-host")(scope, receive, send)
            return
        listed = origin in self.origins
        if origin and not listed and origin.partition("://")[2] != host:
            await _refuse(f"pages of {origin} may not ask: see --allow-origin")(scope, receive, send)
            return
        if listed and scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_preflight(origin))(scope, receive, send)
            return

        async def send_with_origin(message: Message) -> None:
            if listed and message["type"] == "http.response.start":
                allowed = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        with suppress(ClientDisconnect):  # nobody is there to be told
            await self.app(scope, receive, send_with_origin)


def _refuse(detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, 403)


def _preflight(origin: str) -> dict[str, str]:
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": "Authorization, Content-Type",
        "Vary": "Origin",
    }


def _without_port(host: str) -> str:
    """The name in a Host header: example.org:80 is example.org, [::1]:80 is [::1]."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host


def protocol(seconds: float) -> type[H11Protocol]:
    """HTTP/1.1 that closes a connection on which no whole request head comes within so many seconds.

    uvicorn limits only the pause between two requests.
    """

    class Timed(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _watch(self) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering:
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Timed
