"""Documentation pages: their commands, code and examples run, their names exist (`make docs` builds the site)."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from model_dirs import write_model_dir

from fasttfm.cli.main import main
from fasttfm.kernels.launch import interpreted
from fasttfm.system.children import child_environment

from .blocks import DOCS, all_blocks, blocks, make_edits, run

ROOT = DOCS.parent
PAGES = [
    *("paper.md", "errors.md", "how-to-fine-tune.md", "how-to-packed-training.md", "translate.md", "export.md"),
    *("replace-torch-nn.md", "gpt.md", "bert.md", "albert.md", "electra.md"),
]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """In a folder with a model, and after the commands of the export page."""
    monkeypatch.chdir(tmp_path)
    write_model_dir(tmp_path / "MODEL")
    for form, out in {"ctranslate2": "CT2", "pretrained": "PRETRAINED"}.items() if page == "export.md" else ():
        pytest.importorskip("ctranslate2")
        pytest.importorskip("transformers")
        assert main(["export", "MODEL", "--format", form, "--out", out]) == 0
    names = run("\n".join(blocks(page)), tmp_path)
    if page == "export.md":
        assert names["results"][0].hypotheses[0]
        assert names["model"].generate
    shows = {"translate.md": ".", "replace-torch-nn.md": "FusedBertOutput"}
    assert re.search(shows.get(page, ""), capsys.readouterr().out)


@pytest.mark.slow
def test_the_tutorial_goes_from_text_to_bleu(tmp_path):
    """Of alternatives (comments that begin with "or") the last runs."""
    pytest.importorskip("matplotlib")
    programs = []
    for language, block in all_blocks("tutorial.md"):
        for line in block.replace("\\\n", " ").splitlines() if not language else ():
            command, _, comment = line.partition(" # ")
            if comment.startswith("or"):
                programs.pop()
            if command.startswith("fasttfm "):
                programs.append(["-m", *shlex.split(command)])
        if language:
            programs.append(["-c", block])
    environment = {**forked.forked_children(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    options, said = {"cwd": tmp_path, "env": environment, "text": True, "check": True}, ""
    for words in programs:
        files = {"stdout": subprocess.PIPE}
        for sign, stream, mode in (("<", "stdin", "r"), (">", "stdout", "w")):
            if sign in words:
                files[stream] = (tmp_path / words.pop(words.index(sign) + 1)).open(mode)
                words.remove(sign)
        said += forked.run([sys.executable, *words], **options, **files).stdout or ""
    assert "BLEU" in said
    assert (tmp_path / "attention.png").stat().st_size > 1000


OWN_KERNEL = """
x = torch.randn(5, 7, requires_grad=True)
for route in ("triton", "torch"):
    torch.library.opcheck(torch.ops.fasttfm.squared_relu, (x, route))
assert torch.autograd.gradcheck(squared_relu, x.detach().double().requires_grad_())
torch.testing.assert_close(torch.compile(squared_relu, fullgraph=True)(x), reference(x))
"""


@pytest.mark.skipif(not interpreted(), reason="the page's kernels run through Triton's interpreter")
def test_the_code_of_the_kernel_page_runs(tmp_path):
    """In its own process, because it registers operators."""
    code = "\n".join([*blocks("how-to-own-kernel.md"), OWN_KERNEL])
    code = code.replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1)
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    options = {"cwd": tmp_path, "env": child_environment(), "capture_output": True, "text": True}
    done = forked.run([sys.executable, "page.py"], popen=forked.BarePopen, **options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("trainers.md"))
def test_other_trainers_accept_replaced_modules(code, tmp_path, monkeypatch):
    for package in re.findall(r"^(?:from|import) (transformers|lightning|accelerate)\b", code, re.MULTILINE):
        pytest.importorskip(package)
    if "Trainer, TrainingArguments" in code:
        pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    monkeypatch.chdir(tmp_path)
    names = run(code, tmp_path)
    if "TrainingArguments" in names:
        saved = names["BertForSequenceClassification"].from_pretrained(tmp_path / "run" / "model")
        assert type(saved.bert.encoder.layer[0].output).__name__ == "BertOutput", "loads without fasttfm"


def test_the_names_on_the_paper_page_exist():
    rows = [line for line in (DOCS / "paper.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [re.findall(r"`([\w./]+)`", row) for row in rows]
    named = [row for row in named if row]
    assert len(named) == 9
    for reference, operator, kernel in named:
        for name in (reference, operator):
            module, _, function = name.rpartition(".")
            assert callable(getattr(importlib.import_module(f"fasttfm.{module}"), function)), name
        assert (ROOT / kernel).is_file(), kernel


# API pages: every public function and class has an example that runs, and a list of its arguments

API = ROOT / "docs" / "api"
API_PAGES = sorted(path.name for path in API.glob("*.md") if path.name != "index.md")
PUBLIC = {
    "fasttfm.md": "fasttfm",
    "functional.md": "fasttfm.functional",
    "nn.md": "fasttfm.nn",
    "models.md": "fasttfm.models",
    "pretraining.md": "fasttfm_pretraining.models",
}
ON_ANOTHER_PAGE = {"ArgumentError", "ArgumentTypeError", "backend", "__version__"}
OF_DEMO = "demo/model"
"""Examples with the model of `make demo` do not run here."""


def entries(page: str) -> list[tuple[str, str]]:
    """(qualified name, example) of each function and class, in order."""
    text = (API / page).read_text(encoding="utf-8")
    found = re.findall(r"^::: (\S+)\n(?:    .*\n)*(?:\n```python\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL)
    assert found
    return found


@pytest.mark.parametrize("page", API_PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    for name, example in entries(page):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", example), f"{name} has no example"
    code = "\n".join(block for block in blocks(API / page) if OF_DEMO not in block)
    monkeypatch.chdir(tmp_path)
    run(code, tmp_path)


@pytest.mark.parametrize(("page", "module"), PUBLIC.items())
def test_every_public_name_is_on_its_page(page, module):
    shown = {name.rpartition(".")[2] for name, _ in entries(page)}
    public = {name for name in importlib.import_module(module).__all__ if not name.endswith("Config")}
    assert public - ON_ANOTHER_PAGE - shown == set()


def test_the_commands_of_a_masked_model_run_in_order(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("".join(f"Once upon a time there were {n} mice.\nThey ran.\n\n" for n in range(300)))
    small = {"prepare": "--vocab-size 300", "attention": "--layers 1"}
    small["train"] = f"{SMALL} --layers 2 --workers 1 --threads 1 --no-tensorboard"
    ran = []
    for line in blocks("bert.md", "")[0].splitlines():
        words = shlex.split(line)[1:]
        if words[:1] == ["mlm"]:
            assert main([*words, *small.get(words[1], "").split()]) == 0, line
            ran.append(words[1])
    assert ran == ["prepare", "train", "evaluate", "attention"]
    assert Path("attention.png").stat().st_size > 1000


# A search option and a model of one's own: the pages' tests fail before and pass after their edits

COMMANDS = """
import shlex, sys
from fasttfm.cli.main import main
sys.exit(next((status for line in sys.stdin if (status := main(shlex.split(line)[1:]))), 0))
"""
NO_LOOPS = "import sys; sys.modules['numba'] = None\n"
"""In a copy of the tree all loops would be compiled again."""
SMALL = "--max-update 2 --warmup-updates 0 --d-model 16 --heads 2 --d-ff 16 --row-length 32 --max-tokens 512"


@pytest.fixture
def typed(tmp_path):
    """typed(code, text): finished process of Python code with a copy of the tree."""
    for name in ("fasttfm", "pretraining/src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    paths = os.pathsep.join([str(tmp_path), str(tmp_path / "pretraining" / "src")])

    def run(code, text=""):
        options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": paths}, "capture_output": True, "text": True}
        return forked.run([sys.executable, "-c", NO_LOOPS + code], input=text, popen=forked.BarePopen, **options)

    return run


@pytest.mark.parametrize(
    ("page", "edits", "missing", "words"),
    [
        ("how-to-own-search-option.md", 4, "unexpected keyword argument 'no_double'", "--no-double"),
        ("how-to-own-model.md", 7, "No module named 'fasttfm_pretraining.config.looped'", "bits per byte"),
    ],
)
def test_the_edits_of_a_page_add_what_its_test_needs(page, edits, missing, words, typed, tmp_path):
    test = f"import torch; torch.manual_seed(1)\n{blocks(page)[-1]}"
    assert missing in typed(test).stderr
    assert make_edits(page, tmp_path) == edits
    done = typed(test)
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.txt").write_text("".join(f"Once upon a time there were {n} mice.\n\n" for n in range(300)))
    lines = "".join(blocks(page, "")).replace("--preset looped-tiny", f"--preset looped-tiny {SMALL}")
    done = typed(COMMANDS, lines or "fasttfm translate --help-all\n")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
