"""Other projects' tests with fasttfm in their place: what `make peers` says of tests that cannot run."""

import pytest

from fasttfm.errors import UserError
from tests.peer_tests.__main__ import results, why_not
from tests.peer_tests.stand_ins.liger import APPLIED
from tests.peer_tests.suites import SUITES, differences, judge

LIGER = next(suite for suite in SUITES if suite.name == "liger")


@pytest.mark.whole
@pytest.mark.slow
def test_a_test_file_that_cannot_be_imported_is_a_failure_and_the_others_run(tmp_path):
    for name in (*LIGER.files, *LIGER.beside):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if name in LIGER.beside else "def test_that_passes():\n    pass\n")
    broken, *_, unreadable = LIGER.files
    tmp_path.joinpath(broken).write_text("from liger_kernel.ops import NO_SUCH_NAME\n")
    tmp_path.joinpath(unreadable).write_text("def test_\n")
    package = tmp_path / "src" / "liger_kernel"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").touch()
    package.joinpath("ops.py").write_text("".join(f"{name} = None\n" for name in APPLIED))
    verdict = judge(results(LIGER, tmp_path, 8, 0), differences("liger"))
    assert verdict.passed == len(LIGER.files) - 2
    first, second = sorted(verdict.unexplained)
    assert first.startswith("test_cross_entropy.py: ImportError: cannot import name 'NO_SUCH_NAME'"), first
    assert second.startswith("test_rope.py: SyntaxError: "), second


def test_a_folder_that_is_not_the_projects_is_refused_in_a_line(tmp_path):
    with pytest.raises(UserError, match=r"^--liger .* has no test/transformers/\S+: give a checkout of github.com/"):
        why_not(LIGER, tmp_path)
