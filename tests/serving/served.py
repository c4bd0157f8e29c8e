"""A server on a free port of this machine, and what asks it."""

import threading
from contextlib import contextmanager

import requests
from waiting import PATIENCE

from fasttfm.serving.app import App
from fasttfm.serving.connections import Listener, server
from fasttfm.serving.limits import Limits


class Slow:
    """A translator that begins only when it may."""

    def __init__(self, translator):
        self.__dict__.update(vars(translator))
        self.original = translator
        self.may = threading.Event()
        self.begun = threading.Event()
        self.batches = []

    def translate_nbest(self, lines, prefixes, first_line, required):
        self.begun.set()
        assert self.may.wait(PATIENCE)
        self.batches.append(list(lines))
        return self.original.translate_nbest(lines, prefixes, first_line, required)


@contextmanager
def serving(translators, limits=None, token=None, **options):
    """The address of a server; it ends with the block."""
    limits = limits or Limits()
    app = App(translators, limits, token, **options)
    listener = Listener()
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
