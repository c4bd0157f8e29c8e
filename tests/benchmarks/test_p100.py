"""The page and the notebook for old GPUs: tables match the code, cells run."""

import pytest

from benchmarks.measure.machine import ROOT
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.tiles.feed_forward import ROUTE

OLD = {"sm_60": "P100", "sm_70": "V100", "sm_75": "T4"}
ATTENTION = {
    "short": "one Triton kernel, all keys of a row at once",
    "flash": "one Triton kernel, tile after tile",
    "softmax": "cuBLAS, one Triton kernel for mask, softmax and dropout, cuBLAS",
}
FEED_FORWARD = {"fused": "Triton product with everything in it", "cublas": "cuBLAS and one pass for what remains"}


@pytest.mark.parametrize(("kind", "dtype"), [("fp32", "float32"), ("fp16", "float16")])
def test_the_backends_on_the_page_match_the_code(kind, dtype):
    rows = []
    for keys in (27, 100, 500, 2_000):
        size = attention_launch.width_class(64), attention_launch.key_class(keys)
        backends = [ATTENTION[attention_launch.route(CHIPS[chip], kind, *size)] for chip in OLD]
        rows.append([f"attention, {keys:,} keys, heads of 64", dtype, *backends])
    for product in ("forward", "forward+dropout", "backward"):
        backends = [FEED_FORWARD[ROUTE(CHIPS[chip], kind, product)] for chip in OLD]
        rows.append([f"feed-forward, {product.replace('+', ' with ')}", dtype, *backends])
    page = (ROOT / "docs" / "p100.md").read_text(encoding="utf-8")
    assert [row for row in rows if f"| {' | '.join(row)} |" not in page] == []
