"""Runs the Python of fasttfm's GPU path on CPU tensors: its source is loaded with "cpu" and "cuda" exchanged.

    exchange("sm_90")           # for the rest of the process, before any import of fasttfm.functional
    F.layer_norm(x, w, b)       # CPU tensors: runs every line of Python of the same call on a GPU

No kernel is compiled or run: a launch goes through Triton's Python and stops before C. Times leave out C, the driver
and CUDA's allocator, 5 to 7 us per launch.
"""

import functools
import importlib.abc
import importlib.machinery
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from ptx_check.ledger.collect import Compiling

ROOMS = ("functional", "models", "nn", "cpu", "kernels", "search")
"""Packages of fasttfm that look at a tensor's device."""
_DEVICE = SimpleNamespace(
    is_available=lambda: True, current_device=lambda: -1, is_current_stream_capturing=lambda: False
)
"""Replacement for torch.cuda; -1 is get_device() of a CPU tensor."""
_EXCHANGED = {"is_cpu": "is_cuda", "is_cuda": "is_cpu", '"cpu"': '"cuda"', '"cuda"': '"cpu"'}
_ASKED = re.compile(r'\bis_(?:cpu|cuda)\b|(?<=device\.type == )"(?:cpu|cuda)"|(?<=device\.type != )"(?:cpu|cuda)"')
_TORCH_CUDA = re.compile(rf"\btorch\.cuda\.(?={'|'.join(vars(_DEVICE))}\b)")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        text = _ASKED.sub(lambda found: _EXCHANGED[found[0]], self.get_data(path).decode())
        return compile(_TORCH_CUDA.sub("_stand_in.", text), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["_stand_in"] = _DEVICE
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package, room, *rest = [*name.split("."), ""][:3]
        if package != "fasttfm" or room not in ROOMS or "proof" in rest:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _start(*arguments: Any) -> None:
    """Replacement for the C launcher, which calls Triton's launch hooks."""
    for hook in arguments[9:11]:
        if hook is not None:
            hook(arguments[8])


def exchange(chip: str) -> None:
    """Make this process behave as the host of this chip. Raises RuntimeError if fasttfm is already imported."""
    if early := [name for name in sys.modules if name.startswith(tuple(f"fasttfm.{room}" for room in ROOMS))]:
        raise RuntimeError(f"exchange() came after the import of {early[0]}")
    sys.meta_path.insert(0, _Finder())
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    standing: Any = Compiling(chip)
    standing.utils.launch, standing.utils.build_signature_metadata = _start, bytes
    driver.set_active(standing)
    metadata = SimpleNamespace(
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        launch_cooperative_grid=False, launch_pdl=False,
    )  # fmt: skip
    launcher = CudaLauncher(SimpleNamespace(constants={}, signature={}), metadata)

    def compiled(self: Any, key: Any, signature: Any, device: int, *_: Any) -> CompiledKernel:
        kernel = CompiledKernel.__new__(CompiledKernel)
        vars(kernel).update(name=self.fn.__name__, src=None, metadata=metadata, packed_metadata=(4, 1, 0))
        vars(kernel).update(module=1, function=1, _run=launcher)
        self.device_caches[device][0][key] = kernel
        return kernel

    JITFunction._do_compile = compiled
    from fasttfm.kernels import launch
    from fasttfm.kernels.chip import CHIPS

    launch._chip_of_device = functools.cache(lambda index: CHIPS[chip])
