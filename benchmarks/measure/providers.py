"""The peers that a case can be timed against: their names in records, and how to install one that is not here.

A provider's set-up stands in the case that uses it, short and beside a link to its own documentation; this file only
answers whether it is installed: provider(name, device, make) is what make() sets up, or the Absent that its row shows.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Provider = Callable[..., Any]
"""Computes its answer from the arguments that it is given."""
OURS = "fasttfm"
CUDA_GRAPH = f"{OURS}, CUDA graph"
EAGER = "torch eager"
COMPILE = "torch.compile"
TORCH_NN = "torch.nn"
TORCH_GRAPH = f"{TORCH_NN}, CUDA graph"
SDPA = "SDPA"
SDPA_MATH = "SDPA math"
SDPA_FLASH = "SDPA flash"
SDPA_EFFICIENT = "SDPA efficient"
SDPA_CUDNN = "SDPA cuDNN"
SDPA_PADDED = "SDPA, padded"
SDPA_NESTED = "SDPA, nested"
FLEX = "FlexAttention"
TORCH_CHUNKED = "torch linear_cross_entropy"
LIGER = "Liger-Kernel"
FLASH_ATTN = "flash-attn"
HUGGING_FACE = "Hugging Face"
HUGGING_FACE_STATIC = f"{HUGGING_FACE}, static cache"
"""Its step compiled, and from a CUDA graph, as generate() does by itself on a GPU with a cache of fixed shape."""
CTRANSLATE2 = "CTranslate2"

UNSEEN = frozenset({CUDA_GRAPH, TORCH_GRAPH, HUGGING_FACE_STATIC, COMPILE, FLEX, SDPA_NESTED, FLASH_ATTN, CTRANSLATE2})
"""Providers whose launches do not pass through torch's dispatcher one by one and cannot be counted there (nested
tensors do not work under a dispatch mode)."""


ELSEWHERE = frozenset({CTRANSLATE2})
"""Compute in a process of their own, whose memory is not seen here."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A provider that cannot run here; its row says how to get it."""

    install: str
    """The command that installs it, and what else it needs."""


@dataclass(frozen=True, slots=True)
class _Package:
    module: str
    install: str
    gpu: bool = False
    """Whether it computes on CUDA devices alone."""
    capability: tuple[int, int] = (0, 0)
    """The least compute capability that it supports, as its documentation says."""


_PACKAGES = {
    # https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html
    TORCH_CHUNKED: _Package("torch", "pip install 'torch>=2.13'"),
    # https://github.com/linkedin/Liger-Kernel#installation
    LIGER: _Package("liger_kernel", "pip install liger-kernel", gpu=True),
    # https://github.com/Dao-AILab/flash-attention#installation-and-features
    FLASH_ATTN: _Package("flash_attn", "pip install flash-attn --no-build-isolation", gpu=True, capability=(8, 0)),
    # https://huggingface.co/docs/transformers/installation
    HUGGING_FACE: _Package("transformers", "pip install transformers"),
    # https://opennmt.net/CTranslate2/installation.html
    CTRANSLATE2: _Package("ctranslate2", "pip install ctranslate2"),
}


def have(name: str, device: torch.device) -> Absent | None:
    """Return None where the provider can run on device, else what its row says."""
    package = _PACKAGES[name]
    needs = []
    if package.gpu and device.type != "cuda":
        needs.append("needs a CUDA device")
    elif package.capability > (0, 0) and torch.cuda.get_device_capability(device) < package.capability:
        needs.append(f"needs compute capability {package.capability[0]}.{package.capability[1]}")
    installed = importlib.util.find_spec(package.module) is not None
    if installed and not needs:
        return None
    return Absent("; ".join([f"installed as {package.module}" if installed else package.install, *needs]))


def provider(name: str, device: torch.device, make: Callable[[], Provider]) -> Provider | Absent:
    """Return what make() sets up, where it can run on device; an installed and broken one refuses, in its own words.

    A wheel of another torch fails when it is imported: that is this row's matter, not the whole case's.
    """
    absent = have(name, device)
    if absent is not None:
        return absent
    try:
        return make()
    except Exception as error:
        return refusing(error)


def refusing(reason: str | Exception) -> Provider:
    """A provider that refuses whatever it is given."""

    def run(*inputs: Any) -> Any:
        raise reason if isinstance(reason, Exception) else NotImplementedError(reason)

    return run


def compiled(function: Provider, device: torch.device, **options: bool) -> Provider:
    """torch.compile at its best for one shape; options are Inductor's.

    https://docs.pytorch.org/docs/stable/generated/torch.compile.html: dynamic=False. On a CPU random numbers are drawn
    as eager draws them (fallback_random in torch/_inductor/config.py), because its own generator there is several times
    slower.
    """
    if device.type == "cpu":
        options = {"fallback_random": True, **options}
    return torch.compile(function, dynamic=False, options={**options} if options else None)
