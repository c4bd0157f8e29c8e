"""The table of what each chip has and the machine executes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import triton
from ptx_text import HEAD

from ptx_check import CHIPS
from ptx_check.forms import accepted, carrying
from ptx_check.support import FAMILIES, table

PAGE = Path(__file__).parents[2] / "docs" / "ptx.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs the repository's documentation")


def assembled(text: str, target: str, folder: Path) -> subprocess.CompletedProcess:
    """What Triton's newest assembler says, or its other one of what the newest has forgotten."""
    name = "ptxas" if target in ("sm_60", "sm_70", "sm_90a") else "ptxas-blackwell"
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not shutil.which(str(assembler)):
        pytest.skip(f"this Triton comes without {name}")
    (folder / "one.ptx").write_text(text)
    command = [str(assembler), "-v", "-arch", target, "-o", "/dev/null", str(folder / "one.ptx")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_has_the_table_as_the_code_makes_it_and_tells_how_many_forms_there_are():
    """`ptx-check --table` prints it."""
    page = PAGE.read_text()
    found = re.search(r"<!-- chips: [^>]*-->\n\n(.*?)\n\n<!-- end of chips -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == table()
    assert f"{len(accepted() | carrying()):,}" in page


@pytest.mark.parametrize("chip", CHIPS)
def test_the_assembler_takes_what_a_chip_is_said_to_have_and_nothing_else(chip, tmp_path):
    target = chip + ("a" if chip in ("sm_90", "sm_100", "sm_120") else "")
    head = HEAD.format(name="probe", target=target, threads=32, parameters="")
    having = [family for family in FAMILIES if family.on(chip)]
    done = assembled(head + "".join(f"{family.example};\n" for family in having) + "ret;\n}\n", target, tmp_path)
    assert done.returncode == 0, done.stderr[:500]
    for family in FAMILIES:
        if family not in having:
            done = assembled(f"{head}{family.example};\nret;\n}}\n", target, tmp_path)
            assert done.returncode != 0, family.name


BETWEEN = """ld.param.b64 %rd1, [probe_param_0];
ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd1];
ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%rd1+16];
mov.b32 %r30, 0;
mov.b32 %r31, 0;
mov.b32 %r32, 0;
mov.b32 %r33, 0;
mov.b64 %rd2, 4611686293305294848;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r30, %r31, %r32, %r33}, {%r20, %r21, %r22, %r23}, %rd2, 1, 1, 1, 0;
CHANGED
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r30, %r31, %r32, %r33}, {%r24, %r25, %r26, %r27}, %rd2, 1, 1, 1, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.v4.b32 [%rd1+32], {%r30, %r31, %r32, %r33};
ret;
}
"""


@pytest.mark.parametrize(("changed", "injected"), [("", False), ("mul.f32 %r24, %r25, %r26;", True)])
def test_the_assembler_injects_a_fence_for_fragments_that_are_computed_behind_it(changed, injected, tmp_path):
    """Why that is a note and no fault (control.Touched): ptxas says so."""
    head = HEAD.format(name="probe", target="sm_90a", threads=128, parameters=".param .u64 probe_param_0")
    done = assembled(head + BETWEEN.replace("CHANGED", changed), "sm_90a", tmp_path)
    assert done.returncode == 0
    assert ("warpgroup.arrive is injected" in done.stderr) == injected, done.stderr
