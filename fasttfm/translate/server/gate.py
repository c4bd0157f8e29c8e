"""Host and origin checks in front of the server, and CORS for listed origins.

A page of any website can send requests to a server on its reader's machine, and an attacker's host name can be pointed
at 127.0.0.1 (DNS rebinding). So the server answers only to its own host names, and to pages of other origins only if
they are listed. Sources: Fetch standard, section 3.2 (Origin and CORS); RFC 9110, section 7.2 (Host).
"""

from collections.abc import Collection
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Host names of this machine, accepted by a server that listens on loopback only."""


class Gate:
    """ASGI middleware that refuses other host names and unlisted origins, and answers listed ones as CORS requires."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str] = ()) -> None:
        """hosts: accepted host names without port; None: any. origins: of pages allowed besides the server's own, such
        as https://example.org."""
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
            await _refuse(f"the host name {host!r} is not allowed: see --allow-host")(scope, receive, send)
            return
        listed = origin in self.origins
        if origin and not listed and origin.partition("://")[2] != host:
            await _refuse(f"requests from pages of {origin} are not allowed: see --allow-origin")(scope, receive, send)
            return
        if "content-length" in headers and "transfer-encoding" in headers:  # request smuggling
            detail = "Content-Length and Transfer-Encoding do not go together"
            await JSONResponse({"detail": detail}, 400, {"Connection": "close"})(scope, receive, send)
            return
        if listed and scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_preflight(origin))(scope, receive, send)
            return

        async def send_with_origin(message: Message) -> None:
            if listed and message["type"] == "http.response.start":
                allowed = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        with suppress(ClientDisconnect):
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
    """The host name of a Host header: example.org:80 is example.org, [::1]:80 is [::1]."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host
