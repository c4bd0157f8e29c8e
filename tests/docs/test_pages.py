"""Documentation pages: their code runs, the names they mention exist, and the site has no broken link."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch

from fasttfm.convert.onnx import Encoder, Step
from fasttfm.kernels.launch import interpreted
from fasttfm.models import Transformer
from fasttfm.system.children import child_environment

from .blocks import DOCS, blocks, run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["paper.md", "errors.md", "how-to-fine-tune.md", "how-to-packed-training.md"])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("\n".join(blocks(page)), tmp_path)


OWN_KERNEL = """
x = torch.randn(5, 7, requires_grad=True)
for route in ("triton", "torch"):
    torch.library.opcheck(torch.ops.fasttfm.squared_relu, (x, route))
assert torch.autograd.gradcheck(squared_relu, x.detach().double().requires_grad_())
torch.testing.assert_close(torch.compile(squared_relu, fullgraph=True)(x), reference(x))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.skipif(not interpreted(), reason="the page's kernels run through Triton's interpreter")
def test_the_code_of_the_kernel_page_runs(tmp_path, seed):
    """In its own process, because it registers operators."""
    code = "\n".join([*blocks("how-to-own-kernel.md"), OWN_KERNEL])
    code = code.replace("import torch\n", f"import torch\ntorch.manual_seed({seed})\n", 1)
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


def small_model():
    """(encoder, decoding step, function that makes inputs for both) of a small model."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "heads": 2, "d_ff": 64}
    model = Transformer.from_preset("demo", vocab_size=100, **sizes).eval()
    encoder, step = (kind(model.config, model.state_dict()).eval() for kind in (Encoder, Step))

    def parts(rows, words, before):
        source, mask = torch.randint(4, 100, (rows, words)), torch.ones(rows, words, dtype=torch.bool)
        kept = [torch.randn(1, rows, 2, before, 16) for _ in range(2)]
        return (source, mask), (torch.randint(4, 100, (rows,)), *kept, *encoder(source, mask), mask)

    return encoder, step, parts


BATCH, LENGTH, PAST = (torch.export.Dim(name, max=1000) for name in ("batch", "length", "past"))
ENCODER_SHAPES = ({0: BATCH, 1: LENGTH},) * 2
OVER_SOURCE, OVER_TARGET = {1: BATCH, 3: LENGTH}, {1: BATCH, 3: PAST}
STEP_SHAPES = ({0: BATCH}, OVER_TARGET, OVER_TARGET, OVER_SOURCE, OVER_SOURCE, {0: BATCH, 1: LENGTH})


def exported():
    """(module, exported program, inputs of other sizes) of encoder and step."""
    *modules, parts = small_model()
    examples, others = parts(2, 5, 3), parts(3, 9, 6)
    for module, shapes, example, other in zip(modules, (ENCODER_SHAPES, STEP_SHAPES), examples, others, strict=True):
        yield module, torch.export.export(module, example, dynamic_shapes=shapes), other


@torch.no_grad()
def test_encoder_and_step_go_through_torch_export():
    for module, program, other in exported():
        torch.testing.assert_close(program.module()(*other), module(*other), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif("FASTTFM_TEST_AOTI" not in os.environ, reason="compiles C++ for two minutes: FASTTFM_TEST_AOTI=1")
@torch.no_grad()
def test_encoder_and_step_go_through_aotinductor(tmp_path):
    for module, program, other in exported():
        path = str(tmp_path / f"{type(module).__name__}.pt2")
        compiled = torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(program, package_path=path)
        )
        torch.testing.assert_close(tuple(compiled(*other)), tuple(module(*other)), rtol=1e-4, atol=1e-4)


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
