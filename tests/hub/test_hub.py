"""The package for Hugging Face's `kernels`: meets its requirements, loads with its loader, and equals torch.nn."""

import ast
import base64
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from docs.blocks import DOCS, blocks
from torch import nn

from scripts.hub.__main__ import main
from scripts.hub.package import BACKENDS, write_package

ROOT = Path(__file__).parents[2]


def hugging_faces_kernels():
    """Import Hugging Face's `kernels`, not the directory of that name in the checkout."""
    before = list(sys.path)
    sys.path[:] = [path for path in before if Path(path or ".").resolve() != ROOT]
    try:
        return pytest.importorskip("kernels.layer", reason="needs Hugging Face's kernels") and sys.modules["kernels"]
    finally:
        sys.path[:] = before


kernels = hugging_faces_kernels()


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1, self.dropout, self.linear2 = nn.Linear(16, 40), nn.Dropout(0.0), nn.Linear(40, 16)

    def forward(self, x):
        return self.linear2(self.dropout(torch.relu(self.linear1(x))))


class Post(nn.Module):
    """Like transformers' BertOutput."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = nn.Linear(16, 16), nn.Dropout(0.0), nn.LayerNorm(16)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


LAYER = (16, 2, 40, 0.0)
CASES = {
    "LayerNorm": (nn.LayerNorm, (16,), {}, [(3, 5, 16)], {}),
    "ResidualLayerNorm": (Post, (), {}, [(3, 5, 16), (3, 5, 16)], {}),
    "FeedForward": (Feed, (), {}, [(3, 5, 16)], {}),
    "MultiheadAttention": (
        nn.MultiheadAttention, (16, 2), {"batch_first": True}, [(3, 5, 16), (3, 7, 16), (3, 7, 16)],
        {"key_padding_mask": torch.arange(7) >= torch.tensor([7, 4, 6])[:, None], "need_weights": False},
    ),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer, LAYER, {"batch_first": True}, [(3, 5, 16)],
        {"src_key_padding_mask": torch.arange(5) >= torch.tensor([5, 4, 3])[:, None]},
    ),
    "TransformerDecoderLayer": (
        nn.TransformerDecoderLayer, LAYER, {"batch_first": True, "norm_first": True}, [(3, 5, 16), (3, 7, 16)],
        {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True},
    ),
}  # fmt: skip
"""Name in the package -> class, its arguments and options; shapes of the inputs, and the other inputs."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "fasttfm"
    write_package(folder)
    return folder


@pytest.fixture(scope="module")
def package(repository):
    return kernels.get_local_kernel(repository)


@pytest.fixture(autouse=True)
def mapping():
    """Restore the classes after each test."""
    before = {kind: dict(vars(kind)) for kind, *_ in CASES.values()}
    yield
    for kind, state in before.items():
        for name in ("kernel_layer_name", "kernel_condition"):
            if name in vars(kind) and name not in state:
                delattr(kind, name)


def made(name):
    """A layer, its inputs and options."""
    kind, arguments, settings, shapes, options = CASES[name]
    torch.manual_seed(5)
    return kind(*arguments, **settings), [torch.randn(shape, requires_grad=True) for shape in shapes], options


def kernelized(model, repository, *names, mode=kernels.Mode.TRAINING):
    """Replace the forward of the model's layers by the package's, as users do."""
    table = {}
    for name in names:
        kernels.replace_kernel_forward_from_hub(CASES[name][0], name)
        table[name] = {"cpu": kernels.LocalLayerRepository(repository, layer_name=name)}
    with kernels.use_kernel_mapping(table, inherit_mapping=False):
        return kernels.kernelize(model, mode=mode, device="cpu")


def outcome(model, tensors, options):
    """Return the output and all gradients."""
    out = model(*tensors, **options)
    out = out[0] if isinstance(out, tuple) else out
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [*tensors, *model.parameters()])]


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_with_our_forward_computes_the_same(name, route, repository, package):
    model, *given = made(name)
    want = outcome(model, *given)
    kernelized(model, repository, name)
    assert model.forward.__func__ is getattr(package.layers, name).forward
    with package.backend(route):
        torch.testing.assert_close(outcome(model, *given), want, rtol=2e-5, atol=2e-5)


def test_a_model_whose_layers_norms_and_attentions_are_all_replaced(repository):
    layer, tensors, _ = made("TransformerEncoderLayer")
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16))
    want = outcome(model, tensors, {})
    kernelized(model, repository, "TransformerEncoderLayer", "LayerNorm", "MultiheadAttention")
    assert all("forward" in part.__dict__ for part in (model.norm, model.layers[0], model.layers[1].self_attn))
    torch.testing.assert_close(outcome(model, tensors, {}), want, rtol=2e-5, atol=2e-5)
    assert type(model.layers[0].norm1) is nn.LayerNorm, "what takes a forward keeps its class"


def test_an_overridden_forward_of_an_attention_is_called(repository):
    layer, (x,), _ = made("TransformerEncoderLayer")
    layer.self_attn.forward = lambda query, *_, **__: (torch.zeros_like(query), None)
    kernelized(layer, repository, "TransformerEncoderLayer")
    normed = layer.norm1(x)
    want = layer.norm2(normed + layer.linear2(torch.relu(layer.linear1(normed))))
    torch.testing.assert_close(layer(x), want)


@pytest.mark.inductor
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_declared_compilable_compiles(name, repository, package):
    if not getattr(getattr(package.layers, name), "can_torch_compile", False):
        assert name not in ("LayerNorm", "FeedForward")
        return
    model, tensors, options = made(name)
    kernelized(model, repository, name, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    assert model.forward.__func__ is getattr(package.layers, name).forward
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, **options), model(*tensors, **options))


def test_two_versions_live_in_one_process(package, tmp_path):
    write_package(tmp_path / "other", version=7)
    other = kernels.get_local_kernel(tmp_path / "other")
    assert other.__name__ != package.__name__
    assert other.attention is not package.attention
    x = torch.randn(3, 16)
    torch.testing.assert_close(package.layer_norm(x, None, None), other.layer_norm(x, None, None))
    for each in (package, other):
        assert "residual_norm" in dir(getattr(torch.ops, each.__name__))
        compiled = torch.compile(lambda t, each=each: each.layer_norm(t, None, None), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), nn.functional.layer_norm(x, (16,)))


def test_imports_are_relative_or_of_what_every_user_has(repository):
    files = list((repository / "torch-ext").rglob("*.py"))
    assert len(files) > 50
    for file in files:
        known = {*sys.stdlib_module_names, "torch", "triton"}
        if file.parent.name == "cpu":  # numba loops are imported only if it is installed
            known |= {"numba", "llvmlite", "numpy"}
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= len(file.relative_to(repository / "torch-ext" / "fasttfm").parts), file
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                assert {name.split(".")[0] for name in names} <= known, f"{file}:{node.lineno}"


def test_metadata_names_every_file_and_a_namespace_of_the_build(repository):
    for backend in BACKENDS:
        folder = repository / "build" / f"torch-{backend}"
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["id"].isidentifier()
        assert metadata["id"] in (folder / "_ops.py").read_text()
        assert metadata["backend"] == {"type": backend}
        there = {
            path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "metadata.json" and "__pycache__" not in path.parts
        }
        assert metadata["digest"]["files"] == there


def test_the_command_writes_again_over_its_own_files_and_over_no_others(tmp_path, capsys):
    new, theirs = tmp_path / "new", tmp_path / "theirs"
    assert main(["--out", str(new), "--version", "2", "--repo-id", "me/kernels"]) == 0
    assert "version = 2\n" in (new / "build.toml").read_text()
    (new / ".git").mkdir()  # a repository's own
    assert main(["--out", str(new)]) == 0
    assert "version = 2\n" not in (new / "build.toml").read_text()
    theirs.mkdir()
    for file in (new / "torch-ext" / "fasttfm" / "mine.py", theirs / "thesis.tex"):
        file.touch()
        assert main(["--out", str(new if new in file.parents else theirs)]) == 2
        assert file.name in capsys.readouterr().err


def test_the_page_about_it_runs_and_lists_every_layer(package, tmp_path, monkeypatch):
    (code,) = blocks("hub.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "numba", None)  # its loops would be compiled again, for the new files
    write_package(tmp_path / "KERNELS", version=3)
    names: dict = {}
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        exec(compile(code, "docs/hub.md", "exec"), names)
    assert names["model"].layers[1].forward.__module__.startswith("_fasttfm_cpu_")
    page = (DOCS / "hub.md").read_text(encoding="utf-8")
    listed = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert listed == set(package.layers.__all__) == set(CASES)
    assert all(hasattr(package, name) for name in package.__all__)
