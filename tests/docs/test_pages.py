"""Documentation pages: their commands, code and examples run, their names exist, the site has no broken link."""

import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from model_dirs import write_model_dir

from fasttfm.cli.main import main
from fasttfm.kernels.launch import interpreted
from fasttfm.system.children import child_environment

from .blocks import DOCS, blocks, make_edits, run

ROOT = DOCS.parent
PAGES = ["paper.md", "errors.md", "how-to-fine-tune.md", "how-to-packed-training.md", "translate.md", "export.md"]


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
    assert page != "translate.md" or capsys.readouterr().out.strip()


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


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif("FASTTFM_TEST_AOTI" not in os.environ, reason="compiles C++ for a minute: FASTTFM_TEST_AOTI=1")
@torch.no_grad()
def test_the_exported_encoder_of_the_page_goes_through_aotinductor(tmp_path):
    names = run(next(code for code in blocks("trainers.md") if "torch.export" in code), tmp_path)
    path = torch._inductor.aoti_compile_and_package(names["program"], package_path=str(tmp_path / "encoder.pt2"))
    other = torch.randint(4, 100, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    compiled = torch._inductor.aoti_load_package(path)(*other)
    torch.testing.assert_close(tuple(compiled), tuple(names["encoder"](*other)), rtol=1e-4, atol=1e-4)


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


def test_the_messages_on_the_error_page_are_in_the_code():
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    tables = page[page.index("## From the command line") :]
    messages = re.findall(r"^\| `([^`]+)`", tables, re.MULTILINE)
    assert len(messages) > 15
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for top in (ROOT / "fasttfm", ROOT / "kernels")
        for path in top.rglob("*.py")
        if "kernels" not in path.relative_to(top).parts
    )
    assert [message for message in messages if message not in code] == []
    named = re.findall(r"^\| `fasttfm\.errors\.(\w+)`", page, re.MULTILINE)
    assert len(named) >= 3
    assert all(hasattr(importlib.import_module("fasttfm.errors"), name) for name in named)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with warnings as errors, such as broken links."""
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings")
    pytest.importorskip("material", reason="needs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_without_warnings_and_broken_links(site):
    text = (site / "api" / "functional.html").read_text(encoding="utf-8")
    assert "softmax(Q K^T * scale) V with masking and dropout fused" in text, "docstrings make the reference"
    assert "<code>causal: bool = False</code>" in text, "arguments with types and defaults"
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert 'name="viewport"' in html, f"{page} on a phone"
        assert "tables.css" in html, f"{page}: wide tables"
        assert "<name>" not in html, f"{page} swallows <name> as an element"
        assert 'script src="http' not in html, f"{page} opened from a folder asks no other machine"
        for picture in re.findall(r'<img [^>]*src="([^"]+)"', html):
            assert (page.parent / picture).is_file(), picture
    assert "case:mixed|eff:no" in (site / "index.html").read_text(encoding="utf-8"), "no backslash before a bar in code"


def test_the_five_tasks_need_as_many_clicks_as_contributing_says(site):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| (\d) \| \[[^\]]+\]\((?:docs/)?([^)]+)\)", text, re.MULTILINE)
    assert len(rows) == 5
    first = (site / "index.html").read_text(encoding="utf-8")
    for clicks, link in rows:
        link = link.replace("README.md", "index.html").replace(".md", ".html")
        assert int(clicks) == (0 if link == "index.html" else 1 + link.startswith("api/")), link
        assert f'href="{link}"' in first or link == "index.html", f"{link} is not one click from the first page"


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
"""Examples with the model of `make demo` do not run here, but in test_paths.py."""


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


def test_sentences_about_one_argument_move_to_it():
    pytest.importorskip("griffe", reason="the site is made with it")
    told = runpy.run_path(str(ROOT / "scripts" / "docs_arguments.py"))["told"]
    text = "query (B, L), key (B, S); one dtype. mask, of any\nshape: hides; scale defaults to 1. Returns (B, L)."
    meanings, rest = told(["query", "key", "mask", "scale", "site"], text)
    assert meanings == {"mask": "of any shape: hides.", "scale": "defaults to 1.", "query": "(B, L).", "key": "(B, S)."}
    assert rest == "query (B, L), key (B, S); one dtype. Returns (B, L)."


# GPT, BERT, ALBERT and ELECTRA

SHORT = "--max-update 2 --warmup-updates 0 --d-model 16 --heads 2 --d-ff 16 --layers 2 --workers 1 --threads 1"
SHORTER = {
    "prepare": ["--vocab-size", "300"],
    "train": [*SHORT.split(), "--no-tensorboard"],
    "attention": ["--layers", "1"],
    "generate": ["--tokens", "5"],
}
ROWS = ["--row-length", "32", "--max-tokens", "512"]
EXPORT = "fasttfm mlm export MODEL --out for-transformers"
ENCODER = ["prepare", "train", "evaluate", "attention", "export"]
VERBS = {
    "gpt.md": ["prepare", "train", "evaluate", "generate", "prompt", "few-shot", "export"],
    **dict.fromkeys(("bert.md", "albert.md", "electra.md"), ENCODER),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", VERBS)
def test_the_commands_run_in_order(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("".join(f"Once upon a time there were {n} mice.\nThey ran.\n\n" for n in range(300)))
    for questions in blocks(page, "json")[:1]:
        Path("questions.json").write_text(questions)
    lines = blocks(page, "") if page == "gpt.md" else [blocks(page, "")[0], EXPORT]
    ran = []
    for line in "\n".join(lines).splitlines():
        words = shlex.split(line)[1:]
        if not words or words[0] == "finetune" or "gpt2-folder" in line or "GPT2" in line:
            continue
        more = ROWS if words[:2] == ["mlm", "train"] else []
        assert main([*words, *SHORTER.get(words[1], []), *more]) == 0, line
        ran.append(words[1])
    assert ran == VERBS[page]
    assert Path("MODEL/curve.png").stat().st_size > 1000
    told = capsys.readouterr().out
    if page == "gpt.md":
        assert "bits per byte" in told
        assert "of 3 right" in told
    else:
        assert Path("attention.png").stat().st_size > 1000


@pytest.mark.parametrize("page", VERBS)
def test_the_python_runs(page, tmp_path):
    names = run("\n".join(blocks(page)), tmp_path)
    assert (names["logits"].shape == (2, 16, 300)) if page == "gpt.md" else (names["hidden"].shape == (2, 10, 32))


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
