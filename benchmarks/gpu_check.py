"""One command wherever a GPU is at hand: tests, sanitizer, then `python -m benchmarks --quick` into benchmarks/results.

    python -m benchmarks.gpu_check [--only attention] [--timings]

Exit status 0 when the tests passed and the timings ran. Times are those of the device at hand and of nothing else: each
line names device, driver, versions and commit.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks.__main__ import main as benchmarks_main
from benchmarks.measure import machine
from fasttfm.kernels.proof.assembler import description

_SANITIZED = "tests/gpu/test_kernels.py"


def run_tests() -> int:
    """The tests that need a GPU."""
    return subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q"], cwd=machine.ROOT, check=False).returncode


def run_sanitizer() -> int:
    """compute-sanitizer's memory and race checks over the kernel tests; 0 where the tool is not installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed (it comes with the CUDA toolkit): memory and race checks left out")
        return 0
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", "--target-processes", "all"]
        command += [sys.executable, "-m", "pytest", "-q", "-x", "-k", "sanitized", _SANITIZED]
        if status := subprocess.run(command, cwd=machine.ROOT, check=False).returncode:
            print(f"compute-sanitizer {check} found errors (or the tests failed under it)")
            return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Tests, sanitizer and timings on a GPU."
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="time only cases that contain TEXT")
    parser.add_argument("--timings", action="store_true", help="leave out tests and sanitizer")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "gpu-check: there is no CUDA or ROCm device that torch can use here. Run it on a machine with one (and a "
            "torch build for it); everything that needs none is checked by `make test`.",
            file=sys.stderr,
        )
        return 2
    if torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        print(description(10 * major + minor))
    if not args.timings and (status := run_tests() or run_sanitizer()):
        return status
    return benchmarks_main(["--quick", "--only", args.only])


if __name__ == "__main__":
    sys.exit(main())
