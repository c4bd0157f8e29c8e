"""`python -m fasttfm` is the command `fasttfm`."""

import signal
import sys


def command(started: float | None = None) -> int:
    """Run the command line; a signal before it has begun or after it has ended leaves no traceback either.

    started: when the command began that this process is a part of, by time.monotonic(); None: now.
    """
    # Outside main(), which installs its own handler, Ctrl-C ends the process at once: Python drops an exception that is
    # raised in a callback of an import.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fasttfm.cli.main import main
    from fasttfm.system.children import end_with_parent

    end_with_parent()
    return main(started=started)


if __name__ == "__main__":
    sys.exit(command())
