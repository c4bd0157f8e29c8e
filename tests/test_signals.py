"""A signal ends a command at any point, even where Python or a package drops exceptions."""

import os
import signal
import sys

import pytest
from forked import run as forked_run
from waiting import PATIENCE

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")

PROGRAM = """
import os, signal, sys, time, types
from fasttfm.__main__ import command
NUMBER = int(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
{setup}
def run(args):
{body}
module = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
sys.modules["fasttfm.cli.score"] = module
sys.argv = ["fasttfm", "score"]
sys.exit(command())
"""

IMPORTED = """
import os, signal, sys, time
try:
    os.kill(os.getpid(), int(sys.orig_argv[-1]))
    time.sleep(0.1)
except BaseException:
    pass
"""


def run(tmp_path, number, body, setup=""):
    (tmp_path / "swallows.py").write_text(IMPORTED)
    body = "\n".join(f"    {line}" for line in body.splitlines())
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", PROGRAM.format(body=body, setup=setup), str(int(number))]
    return forked_run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def assert_stopped(done, number):
    assert done.returncode == 128 + number, done.stderr
    told = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    assert done.stderr == f"fasttfm score: {told}\n"
    assert done.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_an_import_that_drops_exceptions(tmp_path, number):
    assert_stopped(run(tmp_path, number, "import swallows\ntime.sleep(30)\nprint('went on')"), number)


def test_ctrl_c_in_an_import_before_the_command_ends_it_at_once(tmp_path):
    """Python drops exceptions in callbacks of imports."""
    setup = (
        "class Swallows:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'fasttfm.cli.main': import swallows\n"
        "sys.modules.pop('fasttfm.cli.main', None)\n"
        "sys.meta_path.insert(0, Swallows)"
    )
    done = run(tmp_path, signal.SIGINT, "print('went on')", setup)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_llvm_links_a_module_is_raised_afterwards(tmp_path, number):
    """Raised in between, it left a module that was freed twice."""
    pytest.importorskip("llvmlite")
    setup = (
        "import llvmlite.binding as llvm\n"
        "from llvmlite.binding import ffi\n"
        "link, call = ffi.lib.LLVMPY_LinkModules, ffi._lib_fn_wrapper.__call__\n"
        "def struck(function, *arguments):\n"
        "    result = call(function, *arguments)\n"
        "    if function is link: os.kill(os.getpid(), NUMBER)\n"
        "    return result\n"
        "ffi._lib_fn_wrapper.__call__ = struck"
    )
    body = "one, other = llvm.parse_assembly(''), llvm.parse_assembly('')\none.link_in(other)\ntime.sleep(30)"
    assert_stopped(run(tmp_path, number, body, setup), number)


def test_a_command_that_drops_the_exception_does_not_succeed(tmp_path):
    body = "try:\n    os.kill(os.getpid(), NUMBER)\n    time.sleep(1)\nexcept BaseException:\n    pass"
    assert_stopped(run(tmp_path, signal.SIGTERM, body), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_interrupts_neither_cleanup_nor_the_final_message(tmp_path, number):
    """GNU timeout sends two, and a launcher forwards every signal."""
    setup = (
        "import fasttfm.cli.main as main\n"
        "fail = main._fail\n"
        "main._fail = lambda *told: (os.kill(os.getpid(), NUMBER), time.sleep(0.01), fail(*told))[-1]"
    )
    again = "os.kill(os.getpid(), NUMBER)\n    time.sleep(0.01)\n"
    body = f"try:\n    {again}finally:\n    {again}"
    assert_stopped(run(tmp_path, number, body, setup), number)


def test_a_starting_trainer_takes_over_a_pending_signal(tmp_path):
    body = (
        "import swallows\n"
        "from fasttfm.training.interrupt import Interruption\n"
        "with Interruption() as interruption:\n"
        "    if interruption.requested and interruption.number == NUMBER: time.sleep(0.1); sys.exit(7)"
    )
    # a long retry interval: the signal must be pending when the trainer starts
    setup = "import fasttfm.system.signals\nfasttfm.system.signals._RETRY = 5\nimport fasttfm.training.interrupt"
    assert run(tmp_path, signal.SIGTERM, body, setup).returncode == 7


# Errors and their exit statuses
