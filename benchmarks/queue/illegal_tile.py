"""Smallest program of the tile that ended on an H100 in an illegal address: short rows backward, 16x128w4.

    python -m benchmarks.queue.illegal_tile [--results FOLDER]

Its PTX is right when executed. Each assembler at hand (Triton's, its second one for newer chips, and those on the PATH)
makes machine code of it in a process of its own, which computes the gradients of 100 keys and their largest error
against float64, under compute-sanitizer where that is installed. The machine code is kept in the folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from benchmarks import command
from fasttfm.cli.parser import Parser
from ptx_check.machine_code.compared import version

_ONE = "FASTTFM_ASSEMBLER"
_LIMIT = 50


def assemblers() -> dict[str, str]:
    """Version -> path, the newest last."""
    from triton import knobs

    found = [Path(knobs.nvidia.ptxas.path)]
    found += [found[0].with_name("ptxas-blackwell"), *map(Path, filter(None, [shutil.which("ptxas")]))]
    found += Path("/usr/local").glob("cuda*/bin/ptxas")
    result: dict[str, str] = {}
    for path in filter(Path.is_file, found):
        result.setdefault(version(str(path)), str(path))
    result.pop("unknown", None)
    return dict(sorted(result.items(), key=lambda item: [int(n) for n in item[0].split(".")]))


def errors(device: str = "cuda") -> dict[str, float]:
    """The largest errors of the three gradients by this tile."""
    import torch

    from fasttfm import reference
    from fasttfm.kernels.attention import once, short
    from fasttfm.kernels.tiles.table import Tile

    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 4, 100, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    output, lse = once.forward("flash", q, k, v, scale=64**-0.5)
    with mock.patch.object(short, "SHORT_BACKWARD", return_value=Tile(16, 128, 4, 1)):
        ours = once.backward("short", g, q, k, v, output, lse, scale=64**-0.5)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(reference.attention(*exact)[0], exact, g.double())
    return {n: (x.double() - y).abs().max().item() for n, x, y in zip(("dq", "dk", "dv"), ours, right)}


def _said(line: list[str], environment: dict[str, str]) -> str:
    """The end of a command's output."""
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"not ended after {_LIMIT} s"
    return (done.stdout + done.stderr).strip()[-1_500:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.queue.illegal_tile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, help="folder that keeps the machine code")
    args = parser.parse_args(argv)
    if os.environ.get(_ONE):
        print(f"{os.environ[_ONE]}:", " ".join(f"{name} {error:.3g}" for name, error in errors().items()), flush=True)
        return 0
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    known = assemblers()
    for named, path in known.items():
        name = "newest" if named == [*known][-1] else named
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, _ONE: name, "TRITON_PTXAS_PATH": path, "TRITON_CACHE_DIR": folder}
            line = [sys.executable, "-m", "benchmarks.queue.illegal_tile"]
            for each in [line, *([[sanitizer, "--tool", "memcheck", *line]] if sanitizer else [])]:
                print(f"ptxas {named}, {Path(each[0]).name}:\n{_said(each, variables)}", flush=True)
            if args.results:
                for cubin in Path(folder).glob("*/_backward.cubin"):
                    shutil.copyfile(cubin, args.results / f"illegal-tile-{named}.cubin")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
