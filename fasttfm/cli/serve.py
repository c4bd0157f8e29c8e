"""Translates over HTTP: POST /translate, GET /health, /metrics, /openapi.json, /docs, and a web page.

Sentences of all clients are batched together. On Ctrl-C or SIGTERM the server finishes pending requests and stops.
"""

import argparse
import errno
import os
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fasttfm.cli.parser import Parser, add_device, add_precision, add_repeated, add_workers
from fasttfm.cli.paths import INPUT_FILE, MODEL
from fasttfm.config import add_field_flags, field_types, field_values
from fasttfm.errors import UserError, optional
from fasttfm.system.signals import taken_over
from fasttfm.system.wording import plain_text
from fasttfm.translate.server.limits import Limits

if TYPE_CHECKING:
    from fasttfm.translate.server.connections import Listener
    from fasttfm.translate.translator import Translator

TOKEN_VARIABLE = "FASTTFM_SERVE_TOKEN"
_LIMITS = [name for name in field_types(Limits) if name != "largest_beam"]
_SHOWN = (
    *("--host", "--port", "--device", "--precision", "--workers", "--token-file"),
    *("--max-sentences", "--max-tokens", "--max-queue", "--max-seconds"),
)
"""Flags that --help shows."""
_EXAMPLES = """
    fasttfm serve MODEL
    fasttfm serve MODEL OTHER --workers auto --host 0.0.0.0 --token-file token
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="+",
        type=MODEL,
        metavar="MODEL",
        help="model directory; requests choose among several by directory name",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: any free port (default: %(default)s)"
    )
    add_device(parser)
    add_precision(parser)
    add_workers(
        parser,
        "processes that translate on a CPU and share the weights and one queue; auto: OMP_NUM_THREADS, or one per core",
        default="1",
    )
    parser.add_argument(
        "--token-file",
        type=INPUT_FILE,
        help=f"file with the bearer token that requests must send (default: the environment variable {TOKEN_VARIABLE})",
    )
    hosts = "host name allowed in requests (default: localhost, 127.0.0.1 and [::1]; any with another --host)"
    add_repeated(parser, "--allow-host", hosts, metavar="NAME")
    origins = "origin whose web pages may send requests, such as https://example.org (default: the server's own page)"
    add_repeated(parser, "--allow-origin", origins, metavar="ORIGIN")
    add_field_flags(parser.add_argument_group("limits"), Limits, _LIMITS, prefix="max_")
    parser.shorten(*_SHOWN, examples=_EXAMPLES)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Returns the exit status."""
    for package in ("uvicorn", "starlette", "prometheus_client"):
        optional(package, "serve")
    from fasttfm.translate.server.app import App
    from fasttfm.translate.server.connections import connections_that_fit, server
    from fasttfm.translate.server.gate import LOOPBACK
    from fasttfm.translate.server.pool import Pool
    from fasttfm.translate.translator import Translator

    if sys.__stdout__ is None:
        print("fasttfm serve: standard output is closed, but the address goes there; use >/dev/null", file=sys.stderr)
        return 1
    try:
        limits = Limits(**field_values(args, _LIMITS))
    except ValueError as error:
        raise UserError(f"--max-{str(error).replace('_', '-')}") from None
    token = _token(args.token_file)
    for origin in args.allow_origin:
        if not re.fullmatch(r"https?://[^/\s]+/?", origin):
            raise UserError(f"--allow-origin {origin}: must be a scheme and a host, such as https://example.org")
    with _listening(args.host, args.port) as listener:
        names = [plain_text(os.path.basename(os.path.realpath(path))).removesuffix(".zip") for path in args.model]
        if len(set(names)) < len(names):
            raise UserError("two models have the same name, which requests use: rename a directory")
        translators = {
            name: Translator.from_directory(path, device=args.device, precision=args.precision, workers=1)
            for name, path in zip(names, args.model)
        }
        host, port = listener.getsockname()[:2]
        is_local = host.startswith("127.") or host == "::1"
        hosts = [*LOOPBACK, *args.allow_host] if is_local else args.allow_host or None
        count = _count(args.workers, translators.values())
        app = App(translators, limits, token, count, hosts=hosts, origins=args.allow_origin)
        if isinstance(app.engine, Pool):
            for each in translators.values():
                each.model = None  # the workers hold it
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {', '.join(translators)} at http://{shown}:{port}", flush=True)
        if token is None and not is_local:
            print(f"fasttfm serve: warning: {host} is open to others and there is no --token-file", file=sys.stderr)
        most = connections_that_fit(limits.connections)
        if most < limits.connections:
            reason = f"as many as open files allow (ulimit -n), not {limits.connections:,}"
            print(f"fasttfm serve: warning: it takes {most:,} connections, {reason}", file=sys.stderr, flush=True)
        running = server(app, listener, replace(limits, connections=most))
        if isinstance(app.engine, Pool):
            app.engine.call_on_failure(lambda: setattr(running, "should_exit", True))
        try:
            running.run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn raises the signal that stopped it again
            taken_over()
        finally:
            app.engine.stop()
    if isinstance(app.engine, Pool) and app.engine.failure is not None:
        raise app.engine.failure
    print("stopped", flush=True)
    return 0


def _count(workers: int | None, translators: "Iterable[Translator]") -> int:
    """Return the number of processes; UserError for several if a model is not on a CPU or the system cannot fork."""
    import torch

    from fasttfm.system.processes import can_fork

    possible = all(can_fork(each.model) for each in translators)
    if not possible and (workers or 1) > 1:
        raise UserError(f"--workers {workers} is for a CPU, on Linux or macOS: leave it out")
    return workers or (torch.get_num_threads() if possible else 1)


def _listening(host: str, port: int) -> "Listener":
    from fasttfm.translate.server.connections import Listener

    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: must be from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = Listener(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # clients that connect while models load wait
    except (OSError, UnicodeError) as error:  # UnicodeError: a host with an empty or a too long part
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or error
        wrong = "--port" if number in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise UserError(f"cannot listen on {host}:{port}: {reason}; give another {wrong}") from None
    return listener


def _token(path: Path | None) -> str | None:
    """Read the token from the file or the environment; None if neither is set."""
    if path is None and TOKEN_VARIABLE not in os.environ:
        return None
    try:
        token = (os.environ[TOKEN_VARIABLE] if path is None else path.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not token or not token.isascii() or len(token.split()) > 1:
        raise UserError(f"{path or TOKEN_VARIABLE}: must hold one token of ASCII characters without spaces")
    return token
