"""A trap that other kernels fell into, and that no room's own tests are about; tests/planted/faults.yaml plants those
of the rooms.
"""

import subprocess
import sys


def test_importing_asks_for_no_device_and_no_triton():
    program = """
import importlib, pkgutil, sys
import torch

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "transformers", "ctranslate2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
def asked(*args, **options):
    raise AssertionError("a device was asked for")
for name in ("is_available", "device_count", "current_device", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, asked)
LAUNCHES = ("fasttfm.search.device.launches", "fasttfm.models.step_launches")  # where kernels are what computes
SUBCLASSES = ("fasttfm.convert.huggingface", "fasttfm.convert.auto_model")  # of the classes of transformers
import fasttfm
for module in pkgutil.walk_packages(fasttfm.__path__, "fasttfm."):
    if not module.name.startswith(("fasttfm.kernels", "fasttfm.__main__", *LAUNCHES, *SUBCLASSES)):
        importlib.import_module(module.name)
assert not {"triton", "torch.utils.flop_counter"} & set(sys.modules)
from fasttfm import functional
x = torch.randn(1, 1, 3, 8, requires_grad=True)
functional.attention(x, x, x, dropout_p=0.1).sum().backward()
functional.layer_norm(x, torch.ones(8), torch.zeros(8))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
