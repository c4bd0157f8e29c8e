"""Exit statuses of interrupted commands, and errors for missing packages."""

import os
import signal
import subprocess
import sys

import pytest

from fasttfm.errors import Stopped, UserError, interrupted, optional


def test_the_status_depends_on_the_signal():
    assert interrupted() == interrupted(KeyboardInterrupt()) == interrupted(Stopped("said")) == 130
    assert interrupted(Stopped(number=signal.SIGTERM)) == 143
    assert str(Stopped()) == ""


@pytest.mark.parametrize("where", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_python_m_exits_with_the_status_of_a_caught_interrupt(tmp_path, where):
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


def test_a_broken_package_is_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.joinpath("broken_package.py").write_text("from errno import NO_SUCH_NAME")
    why = r"cannot be imported \(cannot import name 'NO_SUCH_NAME' from 'errno' .*\): pip install --upgrade"
    with pytest.raises(UserError, match=rf'^broken_package {why} "./fasttfm\[hf\]"$'):
        optional("broken_package", "hf")
    with pytest.raises(UserError, match=r'^no_such_package is not installed: pip install "./fasttfm\[hf\]"$'):
        optional("no_such_package.part", "hf")
