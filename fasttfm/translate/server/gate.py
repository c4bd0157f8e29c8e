"""A gate before the server: takes requests by its own names, from its own page and from listed ones.

A page of any website can send requests to a server on its reader's machine, and a name that an attacker owns can be
pointed at 127.0.0.1 (DNS rebinding). So the server answers to its own names only, and to requests of other pages only
where their origins are listed. Sources: Fetch standard, section 3.2 (Origin and CORS); RFC 9110, section 7.2 (Host).
"""

from collections.abc import Collection
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may see another end of the body
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
