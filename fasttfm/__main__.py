"""`python -m fasttfm` is the command `fasttfm`."""

import signal
import sys


def command(started: float | None = None) -> int:
    """Run the command line; a signal before it has begun or after it has ended leaves no traceback either.

    started: when the command began that this process is a part of, by time.monotonic(); None: now.
    """
    try:
        from fasttfm.cli.main import main
        from fasttfm.system.children import end_with_parent

        end_with_parent()

        return main(started=started)
    except KeyboardInterrupt:  # before main takes care of it
        return 128 + signal.SIGINT
    finally:
        # all work is done: what comes from now on may end the process at once
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(command())
