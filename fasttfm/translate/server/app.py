"""The HTTP application: POST /translate, GET /health, /metrics, /openapi.json, and pages."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fasttfm.system.machine import version
from fasttfm.translate.sentences import LANGUAGES
from fasttfm.translate.server.engine import Engine, Stopping
from fasttfm.translate.server.gate import LOOPBACK, Gate
from fasttfm.translate.server.limits import Limits
from fasttfm.translate.server.metrics import Metrics
from fasttfm.translate.server.openapi import openapi, page
from fasttfm.translate.server.pool import Pool
from fasttfm.translate.server.queue import Answer, QueueFull
from fasttfm.translate.server.requests import Refused, Request, read_request
from fasttfm.translate.translator import Translator

_VERSION = str(version("fasttfm"))
_GONE = 499  # what nginx logs for a client that has closed its connection
_SMALL = 1 << 14
"""Body size in bytes from which requests are parsed one at a time on a second thread, so small ones pass them."""


class App:
    """The application, with one engine for all models."""

    def __init__(
        self,
        translators: Mapping[str, Translator],
        limits: Limits,
        token: str | None = None,
        workers: int = 1,
        *,
        hosts: Collection[str] | None = LOOPBACK,
        origins: Collection[str] = (),
    ) -> None:
        """translators: by model name; the first is the default. token: bearer token required to translate; None: open
        to all. workers: processes that translate, on a CPU; with more than one this process only handles requests.
        hosts, origins: see Gate."""
        self.translators = translators
        self.limits = limits
        self.token = token
        self.metrics = Metrics()
        self._threads = [ThreadPoolExecutor(1, "requests"), ThreadPoolExecutor(1, "large requests")]
        self.engine: Engine | Pool = (
            Engine(translators, self.metrics.step, self.metrics.queue.set, queue=limits.queue)
            if workers == 1
            else Pool(translators, self.metrics, queue=limits.queue, workers=workers)
        )
        self.starlette = Starlette(
            middleware=[Middleware(Gate, hosts=hosts, origins=origins)],
            routes=[
                Route("/", self.page),
                Route("/translate", self.translate, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.show_metrics),
                Route("/openapi.json", self.describe),
                Route("/docs", self.docs),
            ],
        )

    async def page(self, _: HttpRequest) -> Response:
        """The translation page."""
        return _html(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

    async def health(self, _: HttpRequest) -> Response:
        """Models, size limits of a request, and languages of split_sentences."""
        health = {"status": "ok", "models": list(self.translators), "version": _VERSION}
        limits = {"sentences": self.limits.sentences, "body_bytes": self.limits.body_bytes}
        return JSONResponse(
            {**health, **limits, "split_sentences": sorted(LANGUAGES) if find_spec("sentencex") else []}
        )

    async def show_metrics(self, _: HttpRequest) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def describe(self, _: HttpRequest) -> Response:
        """The OpenAPI description."""
        return JSONResponse(openapi([*self.translators], _VERSION, token=self.token is not None))

    async def docs(self, _: HttpRequest) -> Response:
        """The API reference as a page."""
        return _html(page([*self.translators], _VERSION))

    async def translate(self, http: HttpRequest) -> Response:
        """Translations, or a one-line error."""
        begun = http.state.begun
        try:
            response = await self._answer(http, begun + self.limits.seconds)
        except Refused as refused:
            headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(refused.status)
            response = JSONResponse({"detail": refused.detail}, refused.status, headers)
        except ClientDisconnect:
            response = Response(status_code=_GONE)
        self.metrics.requests.labels("/translate", str(response.status_code)).inc()
        self.metrics.seconds.observe(_now() - begun)
        return response

    async def _answer(self, http: HttpRequest, deadline: float) -> Response:
        """The response. Raises ClientDisconnect if the client has gone."""
        self._require_token(http)
        try:
            body = await asyncio.wait_for(self._body(http), deadline - _now())
        except asyncio.TimeoutError:
            raise Refused(504, f"the body did not arrive within {self.limits.seconds:g} seconds") from None
        answered, gone = asyncio.create_task(self._translated(body, deadline)), asyncio.create_task(_disconnected(http))
        tasks = {answered, gone}
        try:
            await asyncio.wait(tasks, timeout=deadline - _now(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in tasks:
                each.cancel()  # no effect on a finished task
            await asyncio.wait(tasks)  # no work is left behind for a client that counts as gone
        if not answered.cancelled():
            return answered.result()
        if not gone.cancelled():
            raise ClientDisconnect
        raise self._too_late()

    async def _translated(self, body: bytes, deadline: float) -> Response:
        thread = partial(asyncio.get_running_loop().run_in_executor, self._threads[len(body) > _SMALL])
        request = await thread(read_request, body, self.translators, self.limits)
        try:
            answers = self.engine.submit(request.sentences)
        except QueueFull:
            raise Refused(429, f"more than {self.limits.queue:,} sentences are waiting: retry later") from None
        except Stopping:
            raise Refused(503, "the server is shutting down") from None
        if request.stream:
            return StreamingResponse(self._events(answers, request, deadline, thread), media_type="text/event-stream")
        try:
            translated = await asyncio.gather(*map(asyncio.wrap_future, answers))
        except Exception as error:
            raise Refused(500, f"the translation failed: {error}") from error
        finally:
            _abandon(answers)
        return Response(await thread(request.answers, translated), media_type="application/json")

    def _require_token(self, http: HttpRequest) -> None:
        if self.token is None:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            raise Refused(401, "a bearer token is needed: Authorization: Bearer TOKEN")

    async def _body(self, http: HttpRequest) -> bytes:
        """The body; reading stops at the size limit."""
        refused = Refused(413, f"the body has more than {self.limits.body_bytes:,} bytes: send fewer texts at once")
        length = http.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.limits.body_bytes:
            raise refused
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > self.limits.body_bytes:
                raise refused
        return bytes(body)

    def _too_late(self) -> Refused:
        return Refused(504, f"no response within {self.limits.seconds:g} seconds: send less text, or retry later")

    async def _events(
        self, answers: list[Answer], request: Request, deadline: float, thread: Callable[..., Awaitable[bytes]]
    ) -> AsyncIterator[bytes]:
        """Server-sent events: one per text in order, then `done`; or `error`."""
        try:
            lines = iter(answers)
            for index, text in enumerate(request.texts):
                try:
                    translated = [
                        await asyncio.wait_for(asyncio.wrap_future(next(lines)), deadline - _now()) for _ in text.lines
                    ]
                    best = await thread(request.answer, text, translated)
                except asyncio.TimeoutError:
                    yield _event({"status": 504, "detail": self._too_late().detail}, "error")
                    return
                except Exception as error:
                    yield _event({"status": 500, "detail": Refused(500, str(error)).detail}, "error")
                    return
                yield b'data: {"index": %d, "translations": %s}\n\n' % (index, best)
            yield _event({"count": len(request.texts)}, "done")
        finally:
            _abandon(answers)


def _html(text: str) -> HTMLResponse:
    """A page whose CSP allows its own inline scripts and styles by hash and nothing else, and forbids framing."""
    rules = [f"{each} 'none'" for each in ("default-src", "base-uri", "frame-ancestors")]
    rules += ["connect-src 'self'", "form-action 'self'"]
    for kind in ("script", "style"):
        hashes = [
            f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
            for block in re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        ]
        if hashes:
            rules.append(f"{kind}-src {' '.join(hashes)}")
    headers = {"Content-Security-Policy": "; ".join(rules), "Referrer-Policy": "no-referrer"}
    return HTMLResponse(text, headers={**headers, "X-Content-Type-Options": "nosniff"})


def _now() -> float:
    return asyncio.get_running_loop().time()


def _event(content: dict[str, Any], name: str) -> bytes:
    return f"event: {name}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def _abandon(answers: list[Answer]) -> None:
    """Abandon all answers: waiting sentences are dropped, running ones leave at the next step."""
    for answer in answers:
        answer.abandon()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
