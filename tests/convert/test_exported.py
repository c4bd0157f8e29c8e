"""torch.export of modules: decomposed and loaded without fasttfm, or on fasttfm's operators."""

import subprocess
import sys

import pytest
import torch
from waiting import PATIENCE

from fasttfm import functional as F
from fasttfm import nn
from fasttfm.convert.exported import export
from fasttfm.errors import ArgumentTypeError


def own_process(code, *arguments):
    """Run code in a new process without fasttfm; -I ignores PYTHONPATH and the working directory."""
    words = ["-I", "-c", f"import sys; sys.modules['fasttfm'] = None\n{code}", *map(str, arguments)]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE)


RUN = """
import torch
program = torch.export.load(sys.argv[1]).module()
given, expected = torch.load(sys.argv[2])
torch.testing.assert_close(program(*given[0], **given[1]), expected, rtol=1e-5, atol=1e-6)
"""


class Functions(torch.nn.Module):
    """Operators without a module in torch.nn."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(11, 16))

    def forward(self, tokens, lengths):
        x = F.embed(tokens, self.table)
        heads = F.rotary(x.unflatten(-1, (2, 8)).transpose(1, 2), *F.rotary_tables(5, 8), torch.arange(5))
        y = F.attention(heads, heads, heads, key_lengths=lengths, causal=True, softcap=5.0, window=(2, 0))
        y = F.rms_norm(F.residual_add(x, y.transpose(1, 2).flatten(2)), None)
        return F.linear_cross_entropy(y, self.table, tokens, label_smoothing=0.1)[0]


X, Y = torch.randn(3, 7, 16), torch.randn(3, 4, 16)
HIDDEN = torch.arange(7) >= torch.tensor([[7], [4], [0]])
LAYER = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True}
CASES = {
    "encoder layer": (nn.TransformerEncoderLayer(**LAYER), (X,), {}),
    "padding": (nn.TransformerEncoderLayer(**LAYER, activation="gelu"), (X,), {"src_key_padding_mask": HIDDEN}),
    "pre-norm decoder layer": (
        nn.TransformerDecoderLayer(**LAYER, norm_first=True), (Y, X), {"tgt_is_causal": True}
    ),
    "whole": (nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (X, Y), {"tgt_is_causal": True}),
    "attention": (nn.MultiheadAttention(16, 2, batch_first=True), (Y, X, X), {"key_padding_mask": HIDDEN}),
    "norm": (nn.RMSNorm(16), (X,), {}),
    "functions": (Functions(), (torch.randint(11, (3, 5)), torch.tensor([5, 2, 1])), {}),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_decomposed_export_loads_and_runs_without_fasttfm(tmp_path, name):
    module, args, kwargs = CASES[name]
    program = export(module.eval(), args, kwargs, decompose=True)
    assert not [node.target for node in program.graph.nodes if "fasttfm" in str(node.target)]
    torch.export.save(program, tmp_path / "module.pt2")
    with torch.no_grad():
        torch.save(((args, kwargs), module(*args, **kwargs)), tmp_path / "given.pt")
    done = own_process(RUN, tmp_path / "module.pt2", tmp_path / "given.pt")
    assert done.returncode == 0, done.stderr


def test_lengths_stay_open_in_a_decomposed_export():
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=100)
    program = export(module, (X,), decompose=True, dynamic_shapes=({0: batch, 1: length},))
    x = torch.randn(5, 40, 16)
    torch.testing.assert_close(program.module()(x), module(x), rtol=1e-5, atol=1e-6)


def test_an_export_on_our_operators_names_the_required_import(tmp_path):
    module, args, kwargs = CASES["encoder layer"]
    program = export(module.eval(), args, kwargs)
    assert "fasttfm.attention.default" in {str(node.target) for node in program.graph.nodes}
    torch.export.save(program, tmp_path / "module.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "module.pt2").module()(*args), module(*args))
    done = own_process("import torch\ntorch.export.load(sys.argv[1])", tmp_path / "module.pt2")
    assert done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if "SerializeError: " in line)
    assert " failed to resolve torch.ops.fasttfm.import_fasttfm_functional_before_torch_export_load." in first, first


def test_wrong_arguments_of_export_are_refused():
    module = torch.nn.Identity()
    for name, wrong in (("module", abs), ("args", X), ("decompose", 1)):
        with pytest.raises(ArgumentTypeError, match=f"^{name} is "):
            export(**{"module": module, "args": (X,), "decompose": False, name: wrong})
