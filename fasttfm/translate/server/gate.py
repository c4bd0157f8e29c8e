"""Host and origin checks in front of the server, and CORS for listed origins.

A page of any website can send requests to a server on its reader's machine, and an attacker's host name can be pointed
at 127.0.0.1 (DNS rebinding). So the server answers only to its own host names, and to pages of other origins only if
they are listed. Sources: Fetch standard, section 3.2 (Origin and CORS); RFC 9110, section 7.2 (Host).
"""

from collections.abc import Collection
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Host names of this machine, accepted by a server that listens on loopback only."""


class Gate:
    """ASGI middleware that refuses other host names and unlisted origins, and answers listed ones as CORS requires."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str] = ()) -> None:
        """hosts: accepted host names without port; None: any. origins: of pages allowed besides the server's own, such
        as https://example.org."""
        self.hosts = None if hosts is None else {each.lower() for each in hosts}
        self.origins = {each.lower().rstrip("/") for each in origins}
        self.app = CORSMiddleware(app, self.origins, ("GET", "POST"), ("Authorization", "Content-Type"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        app: ASGIApp = self.app
        if self.hosts is not None and _without_port(host) not in self.hosts:
            app = _refusal(f"the host name {host!r} is not allowed: see --allow-host")
        elif origin and origin not in self.origins and origin.partition("://")[2] != host:
            app = _refusal(f"requests from pages of {origin} are not allowed: see --allow-origin")
        elif "content-length" in headers and "transfer-encoding" in headers:  # request smuggling
            detail = "Content-Length and Transfer-Encoding do not go together"
            app = JSONResponse({"detail": detail}, 400, {"Connection": "close"})
        with suppress(ClientDisconnect):
            await app(scope, receive, send)


def _refusal(detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, 403)


def _without_port(host: str) -> str:
    """The host name of a Host header: example.org:80 is example.org, [::1]:80 is [::1]."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host
