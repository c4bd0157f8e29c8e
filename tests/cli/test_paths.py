"""No command overwrites its inputs, or files of a model or data directory that it did not make."""

import argparse
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from any_command import PARSERS
from model_dirs import LINES, contents, write_model_dir

from fasttfm.cli.main import main
from fasttfm.cli.paths import OUTPUT_PICTURE, OUTPUT_SHORTLIST, SHARED_FOLDER, TRAINED_MODEL, PathKind, check_paths
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.model_dir import refuse_strangers
from fasttfm.system import folders
from fasttfm.system.files import unfinished, writing

PATH_WORDS = {"FILE", "DIR", "FOLDER", "MODEL", "DATA", "OUT", "CHECKPOINT", "TEACHER", "RUN", "WHOLE", "Q"}
"""Metavars of paths."""


def paths(name: str) -> dict[str, argparse.Action]:
    return {action.dest: action for action in PARSERS[name]._actions if isinstance(action.type, PathKind)}


def excluded(name: str, one: argparse.Action, other: argparse.Action) -> bool:
    groups = [group._group_actions for group in PARSERS[name]._mutually_exclusive_groups]
    return any(one in group and other in group for group in groups)


PAIRS = [
    pytest.param(name, output, other, id=f"{name}: {output.dest} as {other.dest}")
    for name in sorted(PARSERS)
    for output, other in itertools.permutations(paths(name).values(), 2)
    if output.type.writes and not excluded(name, output, other)
]
"""Each argument that is written, with every other path of the same command."""
OUTPUT_FILES = pytest.mark.parametrize(
    ("name", "output"),
    [
        pytest.param(name, action, id=f"{name} {action.dest}")
        for name in sorted(PARSERS)
        for action in paths(name).values()
        if action.type.writes and action.type.is_file
    ],
)


def check(name: str, chosen: dict[argparse.Action, str]) -> None:
    """Check the paths of a command line with these and the defaults of all other arguments."""
    values = {action.dest: action.default for action in PARSERS[name]._actions}
    for action, text in chosen.items():
        is_list = isinstance(action, (argparse._AppendAction, argparse._ExtendAction)) or action.nargs is not None
        values[action.dest] = [action.type(text)] if is_list else action.type(text)
    check_paths(argparse.Namespace(parser=PARSERS[name], **values))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("folder").mkdir()
    Path("folder", "inside").write_text("mine")
    return tmp_path


def test_every_path_has_a_kind_and_holds_no_null_byte():
    """An argument without a PathKind would not be checked."""
    without = []
    for name, parser in PARSERS.items():
        for action in parser._actions:
            words = action.metavar if isinstance(action.metavar, tuple) else [action.metavar]
            named = any(str(word) in PATH_WORDS for word in words) or action.type is Path
            if named and not isinstance(action.type, PathKind) and f"{name} {action.dest}" not in ("score comet",):
                without.append(f"{name} {action.dest}")
    assert without == []
    assert len(PARSERS) > 30
    assert len(OUTPUT_FILES.args[1]) >= 6
    with pytest.raises(argparse.ArgumentTypeError, match="the name of a file holds no null byte"):
        PathKind()("a\0b")


@pytest.mark.sample(14)
@pytest.mark.parametrize(("name", "output", "other"), PAIRS)
def test_no_output_is_another_path_of_the_command(name, output, other, world):
    """By the same path, another spelling, a symbolic link and a hard link."""
    is_folder = output.type.is_file is False or other.type.is_file is False
    there = "folder" if is_folder else "file"
    spellings = [there, f"./folder/../{there}", str(world / there)]
    Path("link").symlink_to(there)
    spellings.append("link")
    if not is_folder:
        os.link("file", "hard")
        spellings.append("hard")
    before = contents(Path())
    for spelling in spellings:
        for mine, theirs in ((spelling, there), (there, spelling)):
            with pytest.raises(UserError, match=r"choose another|is a directory|is a file"):
                check(name, {output: mine, other: theirs})
    assert contents(Path()) == before


@pytest.mark.parametrize(
    ("name", "output", "other"), [p for p in PAIRS if p.values[1].type.replaces and not p.values[2].type.writes]
)
def test_a_folder_that_is_replaced_holds_no_input(name, output, other, world):
    with pytest.raises(UserError, match="is in the directory that --out replaces"):
        check(name, {output: "folder", other: "folder/inside"})


@OUTPUT_FILES
def test_no_file_of_a_model_or_data_folder_is_an_output(name, output, world):
    write_model_dir(Path("MODEL"), trained=False)
    with folders.replacing(Path("DATA"), "writing", "files") as fresh:
        (fresh.path / "train.src.npy").write_text("ids")
        (fresh.path / "notes").write_text("x")
    Path("MODEL/notes.txt").write_text("mine")
    Path("MODEL/curve.png").write_text("a picture")
    Path("outside").symlink_to("MODEL/config.yaml")
    step = "MODEL/checkpoints/step-000000001"
    own = [f"MODEL/{each}" for each in ("config.yaml", "spm.model", "notes.txt", "curve.png", "spm.src.model")]
    own += ["outside", f"{step}/meta.json", f"{step}/x", "DATA/train.src.npy", "DATA/notes", "DATA/.lock"]
    for path in (*own, "-"):
        with pytest.raises(UserError, match=r"which this command did not make: choose another|-: is written to a file"):
            check(name, {output: path})
    free = {OUTPUT_PICTURE: "MODEL/attention.png", OUTPUT_SHORTLIST: "MODEL/vmap.txt"}.get(output.type, "file")
    Path(free).write_text("made before")
    for path in ("MODEL/picture.png", "DATA/list.txt", "file", "new", free):
        check(name, {output: path})


@OUTPUT_FILES
def test_standard_input_and_output_are_files_of_the_command_too(name, output, world, monkeypatch):
    for redirected, path, message in (
        ({"stdin": "r"}, "file", "is standard input: choose another"),
        ({"stdout": "a"}, "file", "is standard output"),
        ({"stdin": "r", "stdout": "a"}, "other", "standard input and standard output are one file"),
    ):
        with monkeypatch.context() as patch:
            for stream, mode in redirected.items():
                patch.setattr(sys, stream, open("file", mode))  # noqa: SIM115
            with pytest.raises(UserError, match=message):
                check(name, {output: path})


@OUTPUT_FILES
def test_an_unwritable_directory_is_refused_before_the_work(name, output, world, monkeypatch):
    Path("link").symlink_to("none/x")
    for path in ("none/x", "none/deep/x", "file/x", "link"):
        with pytest.raises(UserError, match=f"{path}: there is no directory .*: make it first"):
            check(name, {output: path})
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "folder")
    for path in ("folder/new", "folder/inside"):  # root may write everywhere
        with pytest.raises(UserError, match=f"{path}: nothing can be written into"):
            check(name, {output: path})
    check(name, {output: "/dev/null"})


def test_a_hard_link_to_a_file_of_a_folder_that_is_read_is_no_output(world):
    write_model_dir(Path("MODEL"), trained=False)
    os.link("MODEL/spm.model", "hard")
    with pytest.raises(UserError, match=r"hard: is MODEL/spm\.model, which this command reads"):
        check("translate", {paths("translate")["model"]: "MODEL", paths("translate")["alignment"]: "hard"})


def test_a_run_resumes_with_its_own_configuration_but_does_not_start_in_a_user_s_directory(world):
    out, config = paths("train")["out"], paths("train")["config"]
    assert out.type is TRAINED_MODEL
    with pytest.raises(UserError, match="is in the new model directory folder"):
        check("train", {out: "folder", config: "folder/inside"})
    Path("folder/checkpoints").mkdir()
    check("train", {out: "folder", config: "folder/inside"})


def test_the_folder_of_downloads_may_hold_inputs_and_outputs(world):
    data_dir, src, out = (paths("prepare")[name] for name in ("data_dir", "src", "out"))
    assert data_dir.type is SHARED_FOLDER
    check("prepare", {data_dir: "folder", src: "folder/inside", out: "folder/data"})
    Path("data").mkdir()
    check("prepare", {out: "data"})  # the default of --data-dir, which is not used


# Commands as they are typed


@pytest.fixture
def model(world: Path) -> Path:
    write_model_dir(Path("MODEL"), trained=False)
    Path("text").write_text("".join(f"{line}\n" for line in LINES))
    return Path("MODEL")


def test_training_does_not_start_in_an_imported_model(world):
    with folders.replacing(Path("MODEL"), "writing", "files") as fresh:
        (fresh.path / "config.yaml").write_text("kind: gpt\n")
    with pytest.raises(UserError, match="is a model written by another command, which training would overwrite"):
        refuse_strangers(Path("MODEL"))


def test_every_reader_finishes_a_replacement_or_refuses_it(model, monkeypatch):
    """After a kill between two renames, the old configuration must not be combined with the new weights."""
    for number, d_model in enumerate((32, 16)):
        write_model_dir(Path(f"M{number}"), trained=False, d_model=d_model)
        Transformer.from_pretrained(f"M{number}").save_pretrained(f"P{number}", f"M{number}")
    shutil.copytree("P0", "half")
    shutil.copytree("P1", "half/.ready")
    shutil.rmtree("half/.ready/.new", ignore_errors=True)
    os.replace("half/.ready/config.json", "half/config.json")  # here it was killed
    shutil.copytree("half", "held")
    assert Transformer.from_pretrained("half").config.d_model == 16
    assert not Path("half/.ready").exists()
    with folders.locked(Path("held"), "replacing"), pytest.raises(UserError, match="are being replaced by another"):
        Transformer.from_pretrained("held")
    monkeypatch.setattr(sys, "stdin", open("text"))  # noqa: SIM115
    assert main(["tokenize", "held"]) == 0
    assert not Path("held/.ready").exists()


# One file


def stopped(target: Path) -> None:
    with writing(target) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_file_is_replaced_atomically(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    target.chmod(0o600)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / ".file").write_text("mine")
    with writing(tmp_path / "link") as file:
        file.write(b"new")
        assert target.read_text() == "old"
        with pytest.raises(UserError, match="another process is writing it"), writing(target):
            pass
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / ".file").read_text() == "mine"
    with pytest.raises(KeyboardInterrupt):
        stopped(target)
    assert target.read_text() == "new"
    unfinished(target).write_text("what a kill has left")
    with writing(target) as file:
        file.write(b"3")
    assert target.read_text() == "3"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file", "file", "link"]
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path / "none" / "x"):
        pass
    assert caught.value.filename == str(tmp_path / "none" / "x")


def test_a_pipe_is_written_into_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    child = os.fork()
    if not child:
        signal.alarm(20)
        with writing(tmp_path / "pipe") as file:
            file.write(b"through it")
        os._exit(0)
    assert (tmp_path / "pipe").read_bytes() == b"through it"
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "pipe").is_fifo()
