"""What surrounds the code agrees with it: versions, extras, continuous integration, images."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import fasttfm
from fasttfm.config import kinds, read_yaml
from fasttfm.errors import UserError

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the checkout")


def python(*words, cwd=ROOT, check=False):
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=check)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """What setup.py declares, without building anything."""
    script = (
        "import json, setuptools; keep = {}; setuptools.setup = keep.update; "
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py', '__name__': 'setup'}); "
        "print(json.dumps({key: keep[key] for key in ('version', 'install_requires', 'extras_require', 'packages', "
        "'package_data', 'long_description', 'classifiers')}))"
    )
    return yaml.safe_load(python("-c", script, check=True).stdout)


def pinned(package):
    return re.search(rf"^{package}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def test_there_is_one_version(metadata):
    assert metadata["version"] == fasttfm.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fasttfm.__version__
    assert f"torch=={pinned('torch')}" in (ROOT / "Dockerfile").read_text()
    hooks = {
        Path(each["repo"]).name: each["rev"]
        for each in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    }
    assert hooks["ruff-pre-commit"] == "v" + pinned("ruff")


def test_the_changelog_begins_with_this_version_and_each_with_what_breaks_in_60_lines():
    sections = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == fasttfm.__version__
    text = (ROOT / "CHANGELOG.md").read_text()
    for section in re.findall(r"^## .*\n(?s:.*?)(?=^## |\Z)", text, re.MULTILINE):
        assert section.count("\n") <= 60, section[:20]
        assert re.findall(r"^### (.*)", section, re.MULTILINE)[:1] in ([], ["Breaking changes"])
    assert sections == sorted(sections, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


@pytest.mark.parametrize(
    ("tag", "status", "told"),
    [
        (f"v{fasttfm.__version__}", 0, "### Added"),
        ("v0.0.0", 1, f"the tag must be v{fasttfm.__version__}"),
        (fasttfm.__version__, 1, f"the tag must be v{fasttfm.__version__}"),
    ],
)
def test_a_release_has_the_notes_of_its_version(tag, status, told):
    done = python("scripts/release_notes.py", tag)
    assert done.returncode == status
    assert told in (done.stderr if status else done.stdout)
    assert not re.search(r"^## ", done.stdout, re.MULTILINE)


def test_actions_are_pinned_by_their_commits():
    used = [
        line
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in re.findall(r"uses: *(.+)", path.read_text())
    ]
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", line)] == []


def test_a_package_index_gets_no_link_to_a_file_that_it_does_not_have(metadata):
    text = metadata["long_description"]
    assert "<img" not in text
    assert "![" not in text
    assert re.findall(r"\]\((?!https?:)", text) == []
    assert "Three paths" in text


def test_every_python_of_the_classifiers_is_tried_by_continuous_integration(metadata):
    named = {name.rpartition(" ")[2] for name in metadata["classifiers"] if re.search(r":: 3\.\d", name)}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert len(named) > 1
    assert named <= set(jobs["wheel"]["strategy"]["matrix"]["python"])


def test_every_extra_that_an_error_names_exists(metadata):
    named = {
        extra
        for path in (ROOT / "fasttfm").rglob("*.py")
        for extra in re.findall(r"""(?:fasttfm\[|optional\([^()]+, ")(\w+)["\]]""", path.read_text())
    }
    assert {"plots", "tensorboard"} <= named <= set(metadata["extras_require"])
    assert {line for extra, lines in metadata["extras_require"].items() for line in lines} == set(
        metadata["extras_require"]["dev"]
    ), "make test needs them all"


def test_everything_that_is_imported_is_packaged(metadata):
    files = [path for path in (ROOT / "fasttfm").rglob("*.py") if "kernels" not in path.relative_to(ROOT).parts]
    folders = {path.parent for path in files}
    folders |= {ROOT / "fasttfm" / path.parent.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*.py")}
    assert {".".join(folder.relative_to(ROOT).parts) for folder in folders} == set(metadata["packages"])


def test_continuous_integration_calls_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    called = {word for step in steps for word in re.findall(r"make ([a-z-]+)", step)}
    assert {"test", "docs"} <= called <= targets
    scripts = {word for step in steps for word in step.split() if word.startswith("scripts/")}
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
    tests = [word for step in steps for word in step.split() if word.startswith("tests/")]
    assert tests
    assert all((ROOT / path).exists() for path in tests)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint")
def test_the_dockerfile_is_as_hadolint_wants_it():
    done = subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_steps_of_the_dockerfile_are_read_as_docker_reads_them():
    steps = python("scripts/dockerfile.py", "--dry-run", check=True).stdout.splitlines()
    assert steps[0].startswith("RUN apt-get update  && apt-get install"), "lines that go on are one step"
    assert "ENTRYPOINT fasttfm --help" in steps[-1]


def test_every_data_file_of_the_package_is_packaged(metadata):
    """Tables, presets, pages and templates: a wheel without one fails only where it is read."""
    packaged, tops = set(), (ROOT / "fasttfm", ROOT / "kernels")
    for package, patterns in metadata["package_data"].items():
        folder = ROOT.joinpath(*package.removeprefix("fasttfm.").split("."))
        packaged |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = [path for top in tops for path in top.rglob("*.*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path for path in files if path.suffix != ".py" and tops[0] / "kernels" not in path.parents}
    assert all(any(top in path.parents for path in wanted) for top in tops)
    assert wanted <= packaged


def test_the_machine_of_ptx_is_a_distribution_of_its_own_that_make_install_brings():
    """fasttfm does not ask an index for it: nobody holds its name there yet."""
    declared = (ROOT / "ptx-check" / "pyproject.toml").read_text()
    needs = re.search(r"^dependencies = \[(.*)\]$", declared, re.MULTILINE)[1]
    assert re.findall(r'"([a-z-]+)>=', needs) == ["numpy", "triton"]
    assert "--editable ptx-check" in (ROOT / "Makefile").read_text()
    assert "ptx-check" not in (ROOT / "setup.py").read_text()


def test_the_pre_trained_family_is_a_distribution_of_the_same_version():
    declared = (ROOT / "pretraining" / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', declared, re.MULTILINE)[1] == fasttfm.__version__
    assert f'dependencies = ["fasttfm=={fasttfm.__version__}"]' in declared
    assert 'pretraining = "fasttfm_pretraining.kinds"' in declared
    assert "--editable pretraining" in (ROOT / "Makefile").read_text()
    assert "pretraining" not in (ROOT / "setup.py").read_text()
    assert (ROOT / "pretraining" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_its_wheel_and_source_distribution_have_everything(tmp_path):
    """Every module, every preset, and the entry point by which fasttfm finds them."""
    source = tmp_path / "pretraining"
    shutil.copytree(ROOT / "pretraining", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    for build in ("build_wheel", "build_sdist"):
        script = f"from setuptools import build_meta; build_meta.{build}({str(tmp_path)!r})"
        python("-c", script, cwd=source, check=True)
    package = source / "src" / "fasttfm_pretraining"
    wanted = {
        path.relative_to(source / "src").as_posix()
        for path in package.rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in wanted} == {".py", ".typed", ".yaml"}
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert wanted <= {*wheel.namelist()}
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
        assert "[fasttfm.kinds]\npretraining = fasttfm_pretraining.kinds" in wheel.read(entry_points).decode()
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
        assert wanted <= {name.partition("/src/")[2] for name in names}
        assert any(name.endswith("/LICENSE") for name in names)


def test_without_it_its_commands_say_what_to_install():
    """What imports nothing of it works; its commands, verbs and kinds of model end in a line and exit status 2."""
    script = (
        "import sys; from fasttfm.config import kinds; kinds.provider = lambda: None; "
        "from fasttfm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    way = "run pip install ./fasttfm/pretraining above the checkout, or make install"
    for words in (["lm", "train"], ["mlm"], ["finetune", "--help"]):
        done = python("-c", script, *words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert re.fullmatch(rf"fasttfm {words[0]}: \w[^\n]+ fasttfm-pretraining, [^\n]+{re.escape(way)}\n", done.stderr)
    for words in (["--help"], ["train", "--preset", "list"]):
        done = python("-c", script, *words)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_without_it_a_model_of_another_kind_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("kind: gpt\n")
    monkeypatch.setattr(kinds, "provider", lambda: None)
    with pytest.raises(UserError, match=r"line 1: kind 'gpt' is unknown.* pip install \./fasttfm/pretraining"):
        read_yaml(tmp_path / "config.yaml")


def test_without_ptx_check_commands_of_the_proof_say_what_to_install():
    script = "import sys; sys.modules['ptx_check'] = None; import fasttfm.kernels.proof.executed"
    told = python("-c", script).stderr.strip()
    assert told.endswith("pip install ./fasttfm/ptx-check above the checkout (make install does it)")


def test_what_readme_types_of_the_benchmarks_needs_no_ptx_check():
    script = "import sys; sys.modules['ptx_check'] = None; import benchmarks.report.compare, benchmarks.report.page"
    python("-c", script, check=True)
