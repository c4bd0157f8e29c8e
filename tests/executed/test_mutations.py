"""Mutations of our own PTX: a check that never fails proves nothing, so each kind is planted and must be noticed.

Noticed: a fault, or numbers that differ from those of the kernel as it is. The share is printed (pytest -s).
"""

import re

import pytest
import torch

from fasttfm import functional as F
from fasttfm.kernels.proof.ptx import FaultyKernel, Unsupported, executed

KINDS = {
    "barrier removed": (r"^\tbar\.sync .*;$", lambda m: ""),
    "a group fewer waited for": (r"cp\.async\.wait_group\s+(\d+);", lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
    "guard of a load dropped": (r"@%p\d+ (ld\.global)", lambda m: m[1]),
    "guard of a store dropped": (r"@%p\d+ (st\.global)", lambda m: m[1]),
    "shared address off by 4": (r"(st\.shared\S* \[ %r\d+ \+ )0", lambda m: f"{m[1]}4"),
    "global address off by 8": (r"(st\.global\S* \[ %rd\d+ \+ )0", lambda m: f"{m[1]}8"),
    "shuffle distance halved": (r"(bfly\.b32 .*, )(2|4|8|16), 31", lambda m: f"{m[1]}{int(m[2]) // 2}, 31"),
    "transposition dropped": (r"\.trans\.shared", lambda m: ".shared"),
    "fragments exchanged": (r"(mma\.sync.*?\}, \{ )(%r\d+), (%r\d+)", lambda m: f"{m[1]}{m[3]}, {m[2]}"),
}  # fmt: skip
_MOST = 8
"""Of a kind in one kernel, evenly spread."""


def attend() -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (150, 140, 140))
    with F.backend("triton"):
        return F.attention(q, k, v, causal=True, dropout_p=0.1, seed=torch.tensor([7]), key_lengths=torch.tensor([131]))


def mutants(ptx: str, pattern: str, change) -> list[str]:
    """The text with one occurrence changed each."""
    found = list(re.finditer(pattern, ptx, re.MULTILINE))
    chosen = found[:: max(1, len(found) // _MOST)][:_MOST]
    return [ptx[: m.start()] + change(m) + ptx[m.end() :] for m in chosen]


def noticed(ptx: str, wanted: torch.Tensor) -> bool:
    try:
        with executed("sm_80", rewrite=lambda _: ptx):
            return not torch.equal(attend(), wanted)
    except (FaultyKernel, Unsupported):
        return True


@pytest.mark.executed
def test_most_mutations_of_attention_are_noticed():
    seen: list[str] = []
    with executed("sm_80", rewrite=lambda ptx: (seen.append(ptx), ptx)[1]):
        wanted = attend()
    caught = total = 0
    for kind, (pattern, change) in KINDS.items():
        outcomes = [noticed(ptx, wanted) for ptx in mutants(seen[0], pattern, change)]
        print(f"{kind}: {sum(outcomes)} of {len(outcomes)}")
        caught, total = caught + sum(outcomes), total + len(outcomes)
    print(f"all: {caught} of {total}, {caught / total:.0%}")
    assert total > 40
    assert caught / total >= 0.6
