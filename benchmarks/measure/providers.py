"""Names of the peers in records, and how to install those that are missing.

Cases set up their own providers, with a link to the peer's documentation; provider(name, device, make) returns make()
if the peer can run, else the Absent that its row shows.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Provider = Callable[..., Any]
"""Function of a work's inputs."""
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
"""With a cache of fixed shape: on a GPU, generate() then compiles and captures its step."""
CTRANSLATE2 = "CTranslate2"

UNSEEN = frozenset({CUDA_GRAPH, TORCH_GRAPH, HUGGING_FACE_STATIC, COMPILE, FLEX, SDPA_NESTED, FLASH_ATTN, CTRANSLATE2})
"""Providers whose launches bypass torch's dispatcher and cannot be counted there (nested tensors do not work under a
dispatch mode)."""
ELSEWHERE = frozenset({CTRANSLATE2})
"""Providers in a process of their own, whose memory is not measured."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A provider that cannot run here."""

    install: str
    """How to install it, and what else it needs."""


@dataclass(frozen=True, slots=True)
class _Package:
    module: str
    install: str
    gpu: bool = False
    """Runs only on CUDA devices."""
    capability: tuple[int, int] = (0, 0)
    """Minimum compute capability, from its documentation."""


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


def provider(name: str, device: torch.device, make: Callable[[], Provider]) -> Provider | Absent:
    """make() if the provider can run on device, else the Absent for its row.

    If make() raises, the provider raises the same when it is run: a wheel built for another torch, which fails at
    import, is refused in its row and does not break the case.
    """
    package = _PACKAGES[name]
    needs = []
    if package.gpu and device.type != "cuda":
        needs.append("needs a CUDA device")
    elif package.capability > (0, 0) and torch.cuda.get_device_capability(device) < package.capability:
        needs.append(f"needs compute capability {package.capability[0]}.{package.capability[1]}")
    installed = importlib.util.find_spec(package.module) is not None
    if needs or not installed:
        return Absent("; ".join([f"installed as {package.module}" if installed else package.install, *needs]))
    try:
        return make()
    except Exception as error:
        return refusing(error)


def refusing(reason: str | Exception) -> Provider:
    """A provider that always raises: the error, or NotImplementedError with the reason."""

    def run(*inputs: Any) -> Any:
        raise reason if isinstance(reason, Exception) else NotImplementedError(reason)

    return run


def compiled(function: Provider, device: torch.device, **options: bool) -> Provider:
    """torch.compile with dynamic=False, best for a single shape; options are Inductor's.

    https://docs.pytorch.org/docs/stable/generated/torch.compile.html. On a CPU random numbers come from eager's
    generator (fallback_random in torch/_inductor/config.py): Inductor's own is several times slower there.
    """
    if device.type == "cpu":
        options = {"fallback_random": True, **options}
    return torch.compile(function, dynamic=False, options={**options} if options else None)
