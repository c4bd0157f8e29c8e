"""Compiled loops give the same bits when loaded from disk and at any addresses, and obey the rules for fast math."""

import ast
import inspect
import os
import shutil
import sys
from pathlib import Path

import forked
import pytest

pytest.importorskip("numba")
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
    step_passes,
    training_loops,
)

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


LOOPS = amx, attention_loops, attention_scores, embedding_loops, launches, loop_parts, norm_loops
LOOPS += panel_tiles, search_loops, step_loops, training_loops
FAST = {
    each.__name__: each
    for loops in LOOPS
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


def test_a_numba_that_does_not_work_is_reported(monkeypatch):
    monkeypatch.setattr(step_passes, "loops", lambda: 1 // 0)
    with pytest.warns(RuntimeWarning, match="by zero.*set NUMBA_CACHE_DIR"):
        assert not step_passes.usable.__wrapped__()
