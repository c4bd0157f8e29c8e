"""Atomic replacement of a folder's files: which files are replaced, which never are, and kills in between."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run
from killed import environment
from model_dirs import contents

from fasttfm.errors import UserError
from fasttfm.system.folders import PREPARE_AGAIN, compare, read_manifest, reading, replacing


def write(folder: Path, **files: str) -> None:
    with replacing(folder, "writing", "files") as fresh:
        for name, content in files.items():
            (fresh.path / name).write_text(content)


def content(folder: Path) -> dict[str, str]:
    """All files below a folder but its lock and manifest."""
    return {name: text.decode() for name, text in contents(folder, "sha256sums").items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that was written with the files a and b."""
    write(tmp_path / "folder", a="1", b="2")
    return tmp_path / "folder"


def test_new_files_replace_old_ones_and_the_folder_stays(folder: Path):
    inode = folder.stat().st_ino
    assert read_manifest(folder) == {
        name: hashlib.sha256(text).hexdigest() for name, text in (("a", b"1"), ("b", b"2"))
    }
    write(folder, b="3", c="4")
    assert content(folder) == {"b": "3", "c": "4"}
    assert sorted(read_manifest(folder)) == ["b", "c"]
    assert folder.stat().st_ino == inode
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "sha256sums"], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["notes.txt"], r"contains other files \(notes\.txt\), which are not replaced"),
        ([".hidden"], r"contains other files \(\.hidden\), which are not replaced"),
        (["model/weights"], r"contains other files \(model\), which are not replaced"),
        (["config.yaml", "data.yaml", "spm.model", "train.log"], r"is a model directory \(config\.yaml, .*1 more\)"),
    ],
)
def test_unlisted_files_are_refused_by_name(folder: Path, names, told):
    (folder / names[0]).parent.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("mine")
    before = content(folder)
    with pytest.raises(UserError, match=told):
        write(folder, a="2")
    assert content(folder) == before


def test_a_changed_file_is_not_replaced(folder: Path):
    (folder / "b").write_text("edited by hand")
    with pytest.raises(UserError, match=r"folder/b: was changed since it was written, so it is not replaced"):
        write(folder, a="3")
    assert content(folder) == {"a": "1", "b": "edited by hand"}
    (folder / "b").unlink()
    write(folder, a="3")
    assert content(folder) == {"a": "3"}


def test_a_file_created_meanwhile_is_not_replaced(folder: Path):
    with pytest.raises(UserError, match=r"other files \(late\)"), replacing(folder, "writing", "files"):
        (folder / "late").write_text("mine")
    assert content(folder) == {"a": "1", "b": "2", "late": "mine"}


@pytest.mark.parametrize("existed", [True, False])
def test_a_failed_or_cancelled_replacement_changes_nothing(tmp_path: Path, existed: bool):
    folder = tmp_path / "deep" / "folder"
    if existed:
        write(folder, a="1")
    for fails in (True, False):
        with contextlib.suppress(RuntimeError), replacing(folder, "writing", "files") as fresh:
            (fresh.path / "a").write_text("2")
            fresh.commit = False
            if fails:
                raise RuntimeError
        assert folder.exists() is existed
        assert not existed or content(folder) == {"a": "1"}


def test_links_are_kept_and_dangling_ones_refused(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(UserError, match=r"link: is a link to .*disk, which does not exist"):
        write(tmp_path / "link", a="1")
    (tmp_path / "disk").mkdir()
    write(tmp_path / "link", a="1")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "disk") == {"a": "1"}
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="exists and is not a directory"):
        write(tmp_path / "file", a="1")


EVERY_CALL = """
import contextlib, itertools, sys
from pathlib import Path
from killed import calls_of
from fasttfm.system.folders import is_unfinished, read_manifest, replacing
from test_folders import content, write
OLD, NEW = {"a": "old", "b": "old"}, {"b": "new", "c": "new", "d": "new"}
outcomes = set()
for moment in itertools.count(1):
    folder = Path(sys.argv[1]) / str(moment)
    write(folder, **OLD)
    if calls_of(moment, lambda: write(folder, **NEW)) != moment:
        break
    if not is_unfinished(folder):
        left = {name: text for name, text in content(folder).items() if "/" not in name}
        assert left in (OLD, NEW), (moment, left)
    with contextlib.suppress(RuntimeError), replacing(folder, "writing", "files"):
        raise RuntimeError("the next run stops too, after cleaning up")
    after = content(folder)
    assert not is_unfinished(folder) and after in (OLD, NEW), (moment, after)
    assert sorted(read_manifest(folder)) == sorted(after), (moment, after)
    outcomes.add(len(after))
print(moment - 1, sorted(outcomes))
"""


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_kill_before_any_call_leaves_old_or_new_files_and_the_next_run_completes_them(tmp_path: Path):
    done = run([sys.executable, "-c", EVERY_CALL, str(tmp_path)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moments, outcomes = done.stdout.split(" ", 1)
    assert int(moments) > 6
    assert outcomes == "[2, 3]\n"


def test_two_processes_do_not_write_at_the_same_time(tmp_path: Path):
    with replacing(tmp_path / "folder", "preparing data into it", "files") as fresh:
        (fresh.path / "a").write_text("1")
        with pytest.raises(UserError, match=r"another process .* is writing; wait for it"):
            write(tmp_path / "folder", a="2")
    assert content(tmp_path / "folder") == {"a": "1"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "b").write_text("3"), "b: is damaged or was changed, its SHA-256 differs from sha256sums"),
        (lambda f: (f / "b").unlink(), "b: is missing: prepare the data again"),
    ],
)
def test_files_that_differ_from_the_manifest_are_reported(folder: Path, damage, message: str):
    compare(folder, PREPARE_AGAIN)
    with reading(folder):
        pass
    damage(folder)
    with pytest.raises(UserError, match=message):
        compare(folder, PREPARE_AGAIN)
    with pytest.raises(UserError, match=message), reading(folder, PREPARE_AGAIN):
        pass


FOREIGN = "".join(f"{hashlib.sha256(b'mine').hexdigest()}  {name}\n" for name in "ab").encode()


@pytest.mark.parametrize("manifest", [None, b"", b"garbage\n", b"# written by fasttfm\n", FOREIGN])
def test_a_missing_damaged_or_foreign_manifest_allows_nothing(folder: Path, manifest):
    (folder / "sha256sums").unlink()
    if manifest is not None:
        (folder / "sha256sums").write_bytes(manifest)
    with pytest.raises(UserError, match=r"sha256sums: is (missing|empty|damaged)"):
        compare(folder)
    with pytest.raises(UserError, match="contains other files"):
        write(folder, a="2")
