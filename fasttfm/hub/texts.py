"""The files of a kernel repository that are not sources."""

from __future__ import annotations

BUILD_HEADER = "# written by python -m fasttfm.hub, which replaces the sources and builds beside it\n"

FUNCTIONS = (
    "attention",
    "backend",
    "cross_entropy",
    "draw_seed",
    "embed",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "residual_add",
    "residual_layer_norm",
    "scaled_dot_product_attention",
    "varlen_attention",
)
"""What the package has of fasttfm.functional."""

INIT = f'''"""The encoder-decoder Transformer's operators and layers on fused Triton kernels."""

from . import layers
from .functional import {", ".join(FUNCTIONS)}

__all__ = {sorted([*FUNCTIONS, "layers"])}
'''

NAMESPACE = '''"""The namespace of torch.ops that this build's operators are registered in."""

from .._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
'''

OLDER = '''"""For versions of `kernels` that look for a folder of the package's name: the same module once more."""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).parents[1]
_name = f"{__name__}_{abs(hash(str(_folder))):x}"
_spec = importlib.util.spec_from_file_location(_name, _folder / "__init__.py")
_module = importlib.util.module_from_spec(_spec)
sys.modules[_name] = _module
_spec.loader.exec_module(_module)
globals().update({name: getattr(_module, name) for name in [*_module.__all__, "__all__"]})
'''

FLAKE = """{
  description = "fasttfm: the Transformer's kernels in Triton";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""


def build(repo_id: str, version: int, backends: tuple[str, ...]) -> str:
    """build.toml of a package without compiled code."""
    names = "".join(f'    "{name}",\n' for name in backends)
    return (
        f'{BUILD_HEADER}[general]\nname = "fasttfm"\nversion = {version}\nedition = 6\nlicense = "Apache-2.0"\n'
        f'backends = [\n{names}]\n\n[general.hub]\nrepo-id = "{repo_id}"\n\n[torch-noarch]\n'
    )


def namespace(unique: str) -> str:
    """_ops.py, which kernel-builder writes for each build."""
    return (
        f"import torch\n\nops = torch.ops.{unique}\n\n\ndef add_op_namespace_prefix(op_name: str) -> str:\n"
        f'    """The operator\'s name in this build\'s namespace."""\n    return f"{unique}::{{op_name}}"\n'
    )


def card(repo_id: str, version: int, release: str) -> str:
    """CARD.md."""
    return f"""---
library_name: kernels
license: apache-2.0
---

# fasttfm

The operators of "Attention Is All You Need" as fused Triton kernels, forward and backward, of fasttfm {release}:
attention with masks and dropout, LayerNorm with residual and dropout, the feed-forward sub-layer, the label-smoothed
loss. On a CPU, and wherever Triton is absent, the same operators compute in plain PyTorch.

Python 3.10 or newer, torch 2.9 or newer (with its Triton for the kernels), `kernels` 0.11 or newer.

## How to use

```python
import torch
from kernels import LayerRepository, Mode, get_kernel, kernelize, register_kernel_mapping
from kernels import replace_kernel_forward_from_hub

fasttfm = get_kernel("{repo_id}", version={version}, trust_remote_code=True)
q = k = v = torch.randn(2, 8, 50, 64)
out = fasttfm.attention(q, k, v, causal=True)

replace_kernel_forward_from_hub(torch.nn.TransformerEncoderLayer, "TransformerEncoderLayer")
layer = LayerRepository("{repo_id}", layer_name="TransformerEncoderLayer", version={version}, trust_remote_code=True)
register_kernel_mapping({{"TransformerEncoderLayer": {{"cuda": layer, "cpu": layer}}}})
model = kernelize(model, mode=Mode.TRAINING)
```

## Available functions

{", ".join(f"`{name}`" for name in FUNCTIONS)}

## Available layers

| layer | takes the forward of | torch.compile |
|---|---|---|
| `LayerNorm` | `torch.nn.LayerNorm` | yes |
| `ResidualLayerNorm` | layers with `dense`, `dropout`, `LayerNorm`: `BertSelfOutput`, `BertOutput` | yes |
| `FeedForward` | layers with `linear1`, `dropout`, `linear2` and ReLU between | yes |
| `MultiheadAttention` | `torch.nn.MultiheadAttention` | no |
| `TransformerEncoderLayer` | `torch.nn.TransformerEncoderLayer` | no |
| `TransformerDecoderLayer` | `torch.nn.TransformerDecoderLayer` | no |

All have a backward pass. Dropout draws other masks than torch's, from one seed of torch's generator.
A query with no key to attend gives zeros, not NaN.

## Benchmarks

No GPU has run these kernels yet; they are proved through Triton's interpreter and by executing their PTX on a CPU.
"""
