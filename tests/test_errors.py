"""A command stopped by Ctrl-C ends with the status that it returned, wherever the interrupt struck."""

import os
import signal
import subprocess
import sys

import pytest

from fasttfm.errors import Stopped, interrupted


def test_the_status_tells_the_signal():
    assert interrupted() == interrupted(KeyboardInterrupt()) == interrupted(Stopped("said")) == 130
    assert interrupted(Stopped(number=signal.SIGTERM)) == 143
    assert str(Stopped()) == ""


@pytest.mark.parametrize("where", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_an_interrupt_that_was_caught_ends_python_m_with_its_status(tmp_path, where):
    program = f"""
import sys
from fasttfm.errors import interrupted
try:
    {where}
except KeyboardInterrupt:
    sys.exit(interrupted())
"""
    (tmp_path / "stopped.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "stopped"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")
