"""Compiled loops give the same bits when loaded from disk and at any addresses, and obey the rules for fast math."""

import ast
import inspect
import os
import shutil
import sys
from pathlib import Path

import forked
import numpy as np
import pytest

pytest.importorskip("numba")
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

import fasttfm
from fasttfm.cpu import (
    amx,
    attention_loops,
    attention_scores,
    embedding_loops,
    launches,
    loop_parts,
    norm_loops,
    panel_tiles,
    search_loops,
    step_loops,
    training_loops,
)

LOOPS = [amx, embedding_loops, launches, norm_loops, panel_tiles, search_loops, step_loops, training_loops]
PROGRAM = """
import hashlib, sys
import numpy as np
import torch
from numba.core import config

config.reload_config()  # forked from a process with another folder for the cache
from fasttfm.cpu import panels, search_loops, step_loops, thread_team

draw = lambda *shape, random=np.random.default_rng(0): random.standard_normal(shape).astype(np.float32)
rows, heads, size = 8, 2, 16
sums, of_sums, bits = np.empty(rows, np.float32), hashlib.sha256(), hashlib.sha256()
for threads in 20 * (1, 3):  # over a team too
    team, out = (threads, thread_team.start(), 0), np.empty((rows, heads * size), np.float32)
    search_loops.log_sum_exp(team, draw(rows, 340), sums)
    of_sums.update(sums)
    if sys.argv[1] == "sums alone":
        break
    sentences, lengths = np.repeat(np.arange(4, dtype=np.int32), 2), np.array([34, 12, 40, 65])
    keys, values = draw(4, heads, 70, size), draw(4, heads, 70, size)
    step_loops.attend_to_memory(team, draw(rows, 32), None, None, keys, values, sentences, lengths, out, None, None)
    bits.update(out)
    product = panels.PanelProduct(torch.from_numpy(draw(40, 32)), None, False)
    bits.update(product(torch.from_numpy(draw(rows, 32))).numpy())
print(sum(search_loops.log_sum_exp.stats.cache_misses.values()), of_sums.hexdigest(), bits.hexdigest())
"""


def test_loops_loaded_from_disk_give_the_same_bits_and_are_outdated_by_a_change_of_any_source(tmp_path):
    """Functions of other files are inlined into a loop."""
    shutil.copytree(Path(fasttfm.__file__).parent, tmp_path / "fasttfm", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run(which):
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
        return forked.run([sys.executable, "-c", PROGRAM, which], popen=forked.BarePopen, **options).stdout.split()

    source = tmp_path / "fasttfm" / "cpu" / "loop_parts.py"
    (compiled, *first), (loaded, *second) = (run("everything") for _ in range(2))
    assert (compiled, loaded) == ("1", "0")
    assert first == second
    before = run("sums alone")
    source.write_text(source.read_text().replace("return p * from_bits(", "return np.float32(2.0) * p * from_bits("))
    after = run("sums alone")
    assert (before[0], after[0]) == ("0", "1")
    assert before[1] != after[1]


@pytest.mark.parametrize("loops", LOOPS, ids=lambda each: each.__name__)
def test_functions_are_either_cached_entry_points_or_inlined(loops):
    functions = [each for each in vars(loops).values() if isinstance(each, Dispatcher)]
    assert functions
    for each in functions:
        called = not isinstance(each._cache, NullCache)
        assert called != each.targetoptions.get("forceinline", False), each.__name__


@pytest.mark.parametrize("width", [8, 33, 48])
def test_bits_do_not_depend_on_addresses(width):
    memory = np.random.default_rng(0).standard_normal(1 << 14).astype(np.float32)
    x, residual, weight, bias, s, statistics = (memory[1024 * n :][:width] for n in range(6))
    rows = [each[None] for each in (x, residual, s)]
    results = set()
    just_behind_inputs = [at + more for at in (2048, 3072) for more in (width, width + 16)]
    for at in (9000, *just_behind_inputs):
        y = memory[at : at + width]
        step_loops.add_layer_norm(
            (1, 0, 0), *rows[:1], None, None, rows[1], weight, bias, 1e-5, 1, y[None], rows[2], None, None
        )
        of_step = y.tobytes()
        norm_loops.residual_layer_norm(
            (1, 0, 0), 1, width, np.float32(0), np.float32(0),
            *(each.ctypes.data for each in (x, residual, weight, bias)),
            np.float32(1e-5), np.uint64(0), np.uint64(0), 0, np.float32(1), 0,
            *(each.ctypes.data for each in (y, s, statistics, statistics[1:])),
        )  # fmt: skip
        results.add((of_step, y.tobytes()))
    assert len(results) == 1


FAST = {
    each.__name__: each
    for loops in (*LOOPS, attention_loops, attention_scores, loop_parts)
    for each in vars(loops).values()
    if isinstance(each, Dispatcher) and each.targetoptions.get("fastmath")
}


@pytest.mark.parametrize("name", FAST)
def test_functions_with_fast_math_only_reduce(name):
    """LLVM makes two copies of a loop that stores, for overlapping arrays and others, which would round differently."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(FAST[name].py_func))))
    stores = [node for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    assert not stores, f"{name} stores in line {stores[0].lineno}"
    assert any(isinstance(node, ast.For) for node in nodes), f"{name} has no loop"
