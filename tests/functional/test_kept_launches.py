"""A kernel's launch that a plan keeps: started as Triton's launcher does."""

import importlib
from types import SimpleNamespace

import pytest
from triton.runtime import _allocation

from fasttfm.kernels import jit


@pytest.mark.parametrize("scratch", [0, 16])
@pytest.mark.parametrize("name", ["nvidia.driver.CudaLauncher", "amd.driver.HIPLauncher"])
def test_a_launch_passes_the_arguments_of_tritons_launcher(name, scratch, monkeypatch):
    module, kind = f"triton.backends.{name}".rsplit(".", 1)
    launcher, given = object.__new__(getattr(importlib.import_module(module), kind)), []
    options = dict.fromkeys(("launch_cooperative_grid", "launch_pdl", "warp_size", "num_ctas"), 1)
    options |= dict.fromkeys(
        ("global_scratch_align", "global_scratch_size", "profile_scratch_align", "gsan_enabled"), 0
    )
    vars(launcher).update(options, launch=lambda *all: given.append(all), arg_annotations="a", kernel_signature=b"s")
    launcher.profile_scratch_size = scratch
    monkeypatch.setattr(_allocation._profile_allocator, "get", lambda: lambda *all: all)
    # for Triton versions that ask the driver for scratch memory
    active = SimpleNamespace(allocate_default_profile_scratch=lambda size, *rest: (6 * size, *rest))
    monkeypatch.setattr(jit.triton.runtime.driver, "_active", active)
    compiled = SimpleNamespace(function=7, packed_metadata=(4, 1))
    start, before, after = jit.starter(launcher, (2, 3, 1), compiled)
    start(*before, "stream", *after, (8, 9))
    launcher(2, 3, 1, "stream", 7, (4, 1), None, None, None, 8, 9)
    assert given[0] == given[1]
    assert (given[0][-1], (6 * scratch, 0, "stream") in given[0]) == ((8, 9), scratch > 0)
    assert (start is launcher.launch) == (scratch == 0)
