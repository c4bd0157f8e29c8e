"""The kernel for sm_100 in Gluon: its PTX executed on a CPU and compared as that of the kernels for sm_90."""

import re

import pytest
from long_rows import CASES, Given, assert_output_as_accurate

from fasttfm.kernels.attention import once
from fasttfm.kernels.tiles.attention import BLACKWELL_FORWARD

TILES = {64: "256x128w4s2", 128: "256x64w4s3"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [case for case, (*_, sizes, _, _) in CASES.items() if sizes[-1] in TILES])
def test_the_output_is_as_accurate_as_that_of_the_kernel_of_every_chip(case, taking):
    given = Given(case)
    assert_output_as_accurate(given, taking, (BLACKWELL_FORWARD,), TILES[given.query.shape[-1]], name="sm_100")


PLANTED = {
    "no barriers": (r"bar\.sync[^;]*;", "tensor memory that others touched"),
    "no commits": (r"(?m)^.*tcgen05\.commit.*$", "nothing goes on"),
    "no waits at mbarriers": (
        r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", "before the mbarrier of its tcgen05.commit",
    ),
    "no waits for stores": (r"tcgen05\.wait::st[^;]*;", "before tcgen05.wait::st"),
    "no fences": (r"fence\.proxy\.async[^;]*;", "no fence.proxy.async"),
}  # fmt: skip
"""What is taken out of the PTX, and what is reported."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_taken_out_is_noticed(fault, taking):
    given, (pattern, told) = Given("only the diagonal, invisible rows and keys"), PLANTED[fault]
    options = {"rewrite": lambda text: re.sub(pattern, "", text), "raising": False}
    with taking((BLACKWELL_FORWARD,), TILES[64], name="sm_100", **options) as machine:
        once.forward("flash", *given.operands, **given.options)
    assert any(told in fault.message for fault in machine.faults)
