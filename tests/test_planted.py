"""The planted faults (tests/planted) match the current code, and a copy with a fault fails its tests."""

import ast
from pathlib import Path

import pytest

from tests.planted import __main__ as planted

ROOT = Path(__file__).parents[1]
ROOMS = {
    "reference", "kernels", "functional", "cpu", "models", "nn", "search", "training", "data", "convert",
    "translate", "cli", "store", "pretraining", "ptx-check", "system", "config", "benchmarks",
}  # fmt: skip


def test_every_fault_replaces_one_piece_of_text_and_is_valid_python():
    for fault in planted.FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, (fault.file, fault.old)
        assert fault.new != fault.old
        ast.parse(text.replace(fault.old, fault.new))


def test_every_named_test_exists():
    for fault in planted.FAULTS:
        assert fault.tests
        for test in fault.tests:
            name, _, function = test.partition("::")
            tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
            assert not function or function in {
                node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
            }


def test_every_room_has_faults():
    assert {fault.room for fault in planted.FAULTS} == ROOMS


def test_a_failing_test_notices_a_fault_and_the_copy_is_restored(tmp_path, capsys):
    (tmp_path / "one.py").write_text("ONE = 1\n")
    (tmp_path / "test_one.py").write_text("from one import ONE\n\ndef test_it():\n    assert ONE == 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for new, noticed in (("2", True), ("1.0", False)):
        fault = planted.Fault("a", "one.py", "1", new, "the number", ("test_one.py::test_it",))
        assert planted.is_noticed(fault, tmp_path) is noticed
        assert (tmp_path / "one.py").read_text() == "ONE = 1\n"
    missing = planted.Fault("a", "one.py", "1", "2", "the number", ("test_one.py::test_none",))
    with pytest.raises(planted.subprocess.CalledProcessError):
        planted.is_noticed(missing, tmp_path)
