"""A server on a free port, and clients."""

import copy
import json
import socket
import threading
from contextlib import contextmanager

import requests
from waiting import PATIENCE

from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.translate.server.app import App
from fasttfm.translate.server.connections import Listener, server
from fasttfm.translate.server.limits import Limits


class Slow:
    """A translator that waits for `may` before it translates."""

    def __init__(self, translator):
        self.__dict__.update(vars(translator))
        self.original = translator
        self.may = threading.Event()
        self.begun = threading.Event()
        self.batches = []

    def translate_nbest(self, lines, prefixes, numbers, required):
        self.begun.set()
        assert self.may.wait(PATIENCE)
        self.batches.append(list(lines))
        return self.original.translate_nbest(lines, prefixes, numbers, required)


def imported(translator):
    """The translator with the numbering of an imported model, whose tokens have no spans."""
    tokenizer = translator.target_tokenizer
    numbered = Tokenizer(tokenizer.model, Vocabulary(pieces=tokenizer.pieces(range(len(tokenizer))), prefix=[]))
    ours = copy.copy(translator)
    ours.source_tokenizer = ours.target_tokenizer = numbered
    return ours


@contextmanager
def serving(translators, limits=None, token=None, send_buffer=None, **options):
    """The address of a server that runs during the block. send_buffer: bytes of the socket's send buffer."""
    limits = limits or Limits()
    app = App(translators, limits, token, **options)
    listener = Listener()
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    running = server(app, listener, limits)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    listener.listen()
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(PATIENCE)
        app.engine.stop()
        listener.close()
    assert not thread.is_alive()


def ask(url, timeout=PATIENCE, **request):
    return requests.post(f"{url}/translate", json=request, timeout=timeout)


def texts(answer) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [best[0]["text"] for best in answer.json()["translations"]]


def metrics(url):
    return requests.get(f"{url}/metrics", timeout=PATIENCE).text


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def posted(**request):
    """Head and body of a translation request, as bytes."""
    body = json.dumps(request).encode()
    return b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body), body
