"""The package for Hugging Face's `kernels`: meets its requirements, loads with its loader, and equals torch.nn."""

import ast
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fasttfm.errors import UserError
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
    before = {kind: dict(vars(kind)) for kind in (*HOSTS, Feed, Post)}
    yield
    for kind, state in before.items():
        for name in ("kernel_layer_name", "kernel_condition"):
            if name in vars(kind) and name not in state:
                delattr(kind, name)


HOSTS = (nn.LayerNorm, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


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


def kernelized(model, repository, *names, mode=None):
    """Replace the forward of the model's layers by the package's, as users do."""
    kinds = {kind.__name__: kind for kind in HOSTS} | {"FeedForward": Feed, "ResidualLayerNorm": Post}
    table = {}
    for name in names:
        kernels.replace_kernel_forward_from_hub(kinds[name], name)
        table[name] = {"cpu": kernels.LocalLayerRepository(repository, layer_name=name)}
    with kernels.use_kernel_mapping(table, inherit_mapping=False):
        return kernels.kernelize(model, mode=mode or kernels.Mode.TRAINING, device="cpu")


def inputs(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


CASES = {
    "LayerNorm": (lambda: nn.LayerNorm(16), [(3, 5, 16)], {}),
    "ResidualLayerNorm": (Post, [(3, 5, 16), (3, 5, 16)], {}),
    "FeedForward": (Feed, [(3, 5, 16)], {}),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(16, 2, batch_first=True),
        [(3, 5, 16), (3, 7, 16), (3, 7, 16)],
        {"key_padding_mask": torch.arange(7) >= torch.tensor([7, 4, 6])[:, None], "need_weights": False},
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 40, 0.0, batch_first=True),
        [(3, 5, 16)],
        {"src_key_padding_mask": torch.arange(5) >= torch.tensor([5, 4, 3])[:, None]},
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(16, 2, 40, 0.0, batch_first=True, norm_first=True),
        [(3, 5, 16), (3, 7, 16)],
        {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True},
    ),
}


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
    build, shapes, options = CASES[name]
    torch.manual_seed(5)
    model = build()
    tensors = inputs(*shapes)
    want = outcome(model, tensors, options)
    kernelized(model, repository, name)
    assert model.forward.__func__ is getattr(package.layers, name).forward
    with package.backend(route):
        got = outcome(model, tensors, options)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_a_model_whose_layers_norms_and_attentions_are_all_replaced(repository):
    torch.manual_seed(5)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 40, 0.0, batch_first=True), 2, nn.LayerNorm(16))
    tensors = inputs((3, 5, 16))
    want = outcome(model, tensors, {})
    kernelized(model, repository, "TransformerEncoderLayer", "LayerNorm", "MultiheadAttention")
    assert all("forward" in part.__dict__ for part in (model.norm, model.layers[0], model.layers[1].self_attn))
    for one, other in zip(outcome(model, tensors, {}), want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert type(model.layers[0].norm1) is nn.LayerNorm, "what takes a forward keeps its class"


def test_berts_output_layers_take_the_residual_norm(package):
    bert = pytest.importorskip("transformers.models.bert.modeling_bert", reason="needs transformers")
    config = bert.BertConfig(hidden_size=16, intermediate_size=40, hidden_dropout_prob=0.0)
    for kind, width in ((bert.BertSelfOutput, 16), (bert.BertOutput, 40)):
        torch.manual_seed(5)
        layer = kind(config)
        hidden, residual = inputs((2, 5, width), (2, 5, 16))
        got = package.layers.ResidualLayerNorm.forward(layer, hidden, residual)
        torch.testing.assert_close(got, layer(hidden, residual))


def test_an_overridden_forward_of_an_attention_is_called(repository):
    layer = nn.TransformerEncoderLayer(16, 2, 40, 0.0, batch_first=True)
    attention = layer.self_attn
    attention.forward = lambda query, *_, **__: (torch.zeros_like(query), None)
    (x,) = inputs((3, 5, 16))
    kernelized(layer, repository, "TransformerEncoderLayer")
    normed = layer.norm1(x)
    want = layer.norm2(normed + layer.linear2(torch.relu(layer.linear1(normed))))
    torch.testing.assert_close(layer(x), want)


@pytest.mark.inductor
def test_layers_declared_compilable_compile(repository, package):
    declared = [name for name in CASES if getattr(getattr(package.layers, name), "can_torch_compile", False)]
    assert {"LayerNorm", "FeedForward"} <= set(declared)
    for name in declared:
        build, shapes, options = CASES[name]
        model = build()
        kernelized(model, repository, name, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
        assert model.forward.__func__ is getattr(package.layers, name).forward
        tensors = inputs(*shapes)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*tensors, **options), model(*tensors, **options))


def test_two_versions_live_in_one_process(repository, package, tmp_path):
    write_package(tmp_path / "other", version=7)
    other = kernels.get_local_kernel(tmp_path / "other")
    assert other.__name__ != package.__name__
    assert other.attention is not package.attention
    (x,) = inputs((3, 16))
    torch.testing.assert_close(package.layer_norm(x, None, None), other.layer_norm(x, None, None))
    for each in (package, other):
        assert "residual_norm" in dir(getattr(torch.ops, each.__name__))
        compiled = torch.compile(lambda t, each=each: each.layer_norm(t, None, None), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), nn.functional.layer_norm(x, (16,)))


def test_imports_are_relative_or_of_what_every_user_has(repository):
    everywhere = {*sys.stdlib_module_names, "torch", "triton"}
    files = list((repository / "torch-ext").rglob("*.py"))
    assert len(files) > 50
    for file in files:
        # numba loops are imported only if it is installed
        known = everywhere | ({"numba", "llvmlite", "numpy"} if file.parent.name == "cpu" else set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in known, f"{file}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= len(file.relative_to(repository / "torch-ext" / "fasttfm").parts), file
            elif isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= known, f"{file}:{node.lineno}"


def test_metadata_names_every_file_and_a_namespace_of_the_build(repository):
    for backend in BACKENDS:
        folder = repository / "build" / f"torch-{backend}"
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["id"].isidentifier()
        assert metadata["id"] in (folder / "_ops.py").read_text()
        assert metadata["backend"] == {"type": backend}
        listed = metadata["digest"]["files"]
        there = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "metadata.json" and "__pycache__" not in path.parts
        }
        assert listed == {n: base64.b64encode(hashlib.sha256(b).digest()).decode() for n, b in there.items()}


def test_layers_have_a_forward_and_nothing_else(package):
    allowed = {"can_torch_compile", "has_backward", "forward"}
    assert set(package.layers.__all__) == set(CASES)
    for name in package.layers.__all__:
        own = {key for key in vars(getattr(package.layers, name)) if not key.startswith("__")}
        assert own <= allowed, own - allowed
    assert all(hasattr(package, name) for name in package.__all__)


def test_the_command_writes_again_over_its_own_files_and_over_no_others(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "new"), "--version", "2", "--repo-id", "me/kernels"]) == 0
    assert "version = 2\n" in (tmp_path / "new" / "build.toml").read_text()
    for name in (".git", "build/torch-cpu/__pycache__"):  # a repository's own, and left by imports
        (tmp_path / "new" / name).mkdir()
        (tmp_path / "new" / name / "x").touch()
    assert main(["--out", str(tmp_path / "new")]) == 0
    assert "version = 2\n" not in (tmp_path / "new" / "build.toml").read_text()
    (tmp_path / "new" / "torch-ext" / "fasttfm" / "mine.py").touch()
    assert main(["--out", str(tmp_path / "new")]) == 2
    assert "other files (torch-ext/fasttfm/mine.py), which are not replaced" in capsys.readouterr().err
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").touch()
    assert main(["--out", str(tmp_path / "theirs")]) == 2
    assert "choose another --out" in capsys.readouterr().err
    with pytest.raises(UserError, match="not a directory"):
        write_package(tmp_path / "theirs" / "thesis.tex")


def test_the_page_about_it_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "numba", None)  # its loops would be compiled again, for the new files
    write_package(tmp_path / "KERNELS", version=3)
    names: dict = {}
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        exec(compile(blocks[0], "docs/hub.md", "exec"), names)
    assert names["model"].layers[1].forward.__module__.startswith("_fasttfm_cpu_")
    assert {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")} == set(CASES)
