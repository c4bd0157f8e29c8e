"""What numba compiles gives the same bits in the process that compiles it and in those that load it from disk, and
wherever memory lies."""

import ast
import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("numba")
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from fasttfm.cpu import (
    attention_loops,
    attention_scores,
    embedding_loops,
    loop_parts,
    norm_loops,
    panels,
    search_loops,
    step_loops,
    training_loops,
)

LOOPS = [embedding_loops, norm_loops, panels, search_loops, step_loops, training_loops]
PROGRAM = """
import hashlib
import numpy as np
import torch
from fasttfm.cpu import panels, search_loops, step_loops, thread_team

random = np.random.default_rng(0)
draw = lambda *shape: random.standard_normal(shape).astype(np.float32)
rows, heads, size = 8, 2, 16
bits = hashlib.sha256()
for threads in 20 * (1, 3):  # over a team too
    team, out = (threads, thread_team.start()), np.empty((rows, heads * size), np.float32)
    sentences, lengths = np.repeat(np.arange(4, dtype=np.int32), 2), np.array([34, 12, 40, 65])
    keys, values = draw(4, heads, 70, size), draw(4, heads, 70, size)
    step_loops.attend_to_memory(team, draw(rows, 32), None, None, keys, values, sentences, lengths, out, None, None)
    bits.update(out)
    sums = np.empty(rows, np.float32)
    search_loops.log_sum_exp(team, draw(rows, 340), sums)
    bits.update(sums)
    product = panels.PanelProduct(torch.from_numpy(draw(40, 32)), None, False)
    bits.update(product(torch.from_numpy(draw(rows, 32))).numpy())
misses = sum(step_loops.attend_to_memory.stats.cache_misses.values())
print(misses, bits.hexdigest())
"""


def test_loops_loaded_from_disk_give_the_bits_of_those_just_compiled(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (compiled, first), (loaded, second) = (each.stdout.split() for each in outputs)
    assert (compiled, loaded) == ("1", "0")
    assert first == second


@pytest.mark.parametrize("loops", LOOPS, ids=lambda each: each.__name__)
def test_a_function_is_called_from_python_or_inlined(loops):
    functions = [each for each in vars(loops).values() if isinstance(each, Dispatcher)]
    assert functions
    for each in functions:
        called = not isinstance(each._cache, NullCache)
        assert called != each.targetoptions.get("forceinline", False), each.__name__


@pytest.mark.parametrize("width", [8, 33, 48])
def test_where_memory_lies_does_not_change_the_bits(width):
    memory = np.random.default_rng(0).standard_normal(1 << 14).astype(np.float32)
    x, residual, weight, bias, s, statistics = (memory[1024 * n :][:width] for n in range(6))
    rows = [each[None] for each in (x, residual, s)]
    found = set()
    for place in (
        9000,
        *(at + more for at in (2048, 3072) for more in (width, width + 16)),
    ):  # just behind what is read
        y = memory[place : place + width]
        step_loops.add_layer_norm(
            (1, 0), *rows[:1], None, None, rows[1], weight, bias, 1e-5, 1, y[None], rows[2], None, None
        )
        of_step = y.tobytes()
        norm_loops.residual_layer_norm(
            (1, 0), 1, width, np.float32(0), np.float32(0), *(each.ctypes.data for each in (x, residual, weight, bias)),
            np.float32(1e-5), np.uint64(0), np.uint64(0), 0, np.float32(1), 0,
            *(each.ctypes.data for each in (y, s, statistics, statistics[1:])),
        )  # fmt: skip
        found.add((of_step, y.tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize(
    "loops", [*LOOPS, attention_loops, attention_scores, loop_parts], ids=lambda each: each.__name__
)
def test_what_may_add_in_any_order_writes_nothing(loops):
    """Of a loop that writes there are two copies, for arrays that lie apart and for those that may not."""
    functions = [each for each in vars(loops).values() if isinstance(each, Dispatcher)]
    for each in functions:
        if each.targetoptions.get("fastmath"):
            tree = ast.parse(inspect.getsource(each.py_func))
            writes = [
                node for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            ]
            assert not writes, f"{each.__name__} writes in line {writes[0].lineno}"
            assert any(isinstance(node, ast.For) for node in ast.walk(tree)), f"{each.__name__} adds up nothing"
