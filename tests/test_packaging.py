"""What surrounds the code agrees with it: versions, extras, continuous integration, images."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
import yaml

import fasttfm
from fasttfm.cli.main import main
from fasttfm.config import kinds, read_yaml
from fasttfm.errors import UserError

ROOT, VERSION = Path(__file__).parents[1], fasttfm.__version__
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the checkout")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def python(*words, cwd=ROOT, check=False):
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=check)


@pytest.fixture(scope="module")
def metadata():
    """What setup.py declares, without building anything."""
    declared = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", declared.update)
        runpy.run_path("setup.py")
    return declared


# Versions


def test_there_is_one_version(metadata):
    assert metadata["version"] == VERSION
    assert yaml.safe_load(read("CITATION.cff"))["version"] == VERSION
    pinned = dict(re.findall(r"^(torch|ruff)==(\S+)", read("constraints.txt"), re.MULTILINE))
    assert f"torch=={pinned['torch']}" in read("Dockerfile")
    hooks = {Path(each["repo"]).name: each["rev"] for each in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]}
    assert hooks["ruff-pre-commit"] == "v" + pinned["ruff"]


def test_the_changelog_begins_with_this_version_and_each_with_what_breaks_in_60_lines():
    text = read("CHANGELOG.md")
    versions = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert versions[0] == VERSION
    for section in re.findall(r"^## .*\n(?s:.*?)(?=^## |\Z)", text, re.MULTILINE):
        assert section.count("\n") <= 60, section[:20]
        assert re.findall(r"^### (.*)", section, re.MULTILINE)[:1] in ([], ["Breaking changes"])
    assert versions == sorted(versions, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


# Continuous integration and images


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]


def test_actions_are_pinned_by_their_commits():
    workflows = "\n".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    used = re.findall(r"uses: *(.+)", workflows)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", line)] == []


def test_every_python_of_the_classifiers_is_tried_by_continuous_integration(metadata, jobs):
    named = {name.rpartition(" ")[2] for name in metadata["classifiers"] if re.search(r":: 3\.\d", name)}
    assert len(named) > 1
    assert named <= set(jobs["wheel"]["strategy"]["matrix"]["python"])


def test_continuous_integration_calls_targets_and_files_that_exist(jobs):
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    called = {word for step in steps for word in re.findall(r"make ([a-z-]+)", step)}
    assert {"test", "docs"} <= called <= set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for top in ("scripts/", "tests/"):
        files = [word for step in steps for word in step.split() if word.startswith(top)]
        assert files
        assert [file for file in files if not (ROOT / file).exists()] == []


# What is packaged


def test_a_package_index_gets_no_link_to_a_file_that_it_does_not_have(metadata):
    text = metadata["long_description"]
    assert "Three paths" in text
    assert re.findall(r"\]\((?!https?:)|<img|!\[", text) == []


def test_every_extra_that_an_error_names_exists(metadata):
    named = {
        extra
        for path in (ROOT / "fasttfm").rglob("*.py")
        for extra in re.findall(r"""(?:fasttfm\[|optional\([^()]+, ")(\w+)["\]]""", path.read_text())
    }
    extras = metadata["extras_require"]
    assert {"plots", "tensorboard"} <= named <= set(extras)
    assert {line for lines in extras.values() for line in lines} == set(extras["dev"]), "make test needs them all"


def test_every_module_and_data_file_is_packaged(metadata):
    """Tables, presets, pages and templates: a wheel without one fails only where it is read."""
    files = {
        Path(name, path.relative_to(folder)): path
        for name, folder in (("fasttfm", ROOT / "fasttfm"), ("fasttfm/kernels", ROOT / "kernels"))
        for path in folder.rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {".".join(file.parent.parts) for file in files if file.suffix == ".py"} == set(metadata["packages"])
    packaged = {
        path
        for package, patterns in metadata["package_data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.removeprefix("fasttfm.").split(".")).glob(pattern)
    }
    data = {path for path in files.values() if path.suffix != ".py"}
    assert {path.relative_to(ROOT).parts[0] for path in data} == {"fasttfm", "kernels"}
    assert data <= packaged


def test_the_wheel_and_source_distribution_of_the_pre_trained_family_have_everything(tmp_path):
    """Every module, every preset, and the entry point by which fasttfm finds them."""
    source = tmp_path / "pretraining"
    shutil.copytree(ROOT / "pretraining", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    builds = "".join(f"; build_meta.build_{kind}({str(tmp_path)!r})" for kind in ("wheel", "sdist"))
    python("-E", "-c", f"from setuptools import build_meta{builds}", cwd=source, check=True)
    package = source / "src" / "fasttfm_pretraining"
    wanted = {path.relative_to(source / "src").as_posix() for path in package.rglob("*.*") if path.is_file()}
    assert {Path(name).suffix for name in wanted} == {".py", ".typed", ".yaml"}
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert wanted <= {*wheel.namelist()}
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
        assert "[fasttfm.kinds]\npretraining = fasttfm_pretraining.kinds" in wheel.read(entry_points).decode()
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
        assert wanted <= {name.partition("/src/")[2] for name in names}
        assert any(name.endswith("/LICENSE") for name in names)
    assert read("pretraining/LICENSE") == read("LICENSE")


# Without the other distributions


def test_without_the_pre_trained_family_its_commands_say_what_to_install(monkeypatch, refusal_of, tmp_path):
    """What imports nothing of it works; its commands, verbs and kinds of model end in a line and exit status 2."""
    monkeypatch.setattr(kinds, "provider", lambda: None)
    way = "run pip install ./fasttfm/pretraining above the checkout, or make install"
    for words in (["lm", "train"], ["mlm"], ["finetune", "--help"]):
        told = refusal_of(words)
        assert re.fullmatch(rf"fasttfm {words[0]}: \w[^\n]+ fasttfm-pretraining, [^\n]+{re.escape(way)}", told)
    assert main(["train", "--preset", "list"]) == 0
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    (tmp_path / "config.yaml").write_text("kind: gpt\n")
    with pytest.raises(UserError, match=r"line 1: kind 'gpt' is unknown.* pip install \./fasttfm/pretraining"):
        read_yaml(tmp_path / "config.yaml")


def test_without_ptx_check_commands_of_the_proof_say_what_to_install_and_the_benchmarks_run():
    script = "import sys; sys.modules['ptx_check'] = None; import benchmarks.report.compare, benchmarks.report.page\n"
    told = python("-c", f"{script}print('until here')\nimport fasttfm.kernels.proof.executed")
    assert told.stdout == "until here\n", told.stderr
    assert told.stderr.strip().endswith("pip install ./fasttfm/ptx-check above the checkout (make install does it)")
