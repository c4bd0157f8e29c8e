#!/usr/bin/env bash
# Wherever a GPU is at hand: the tests that need one, compute-sanitizer over the kernels where it is installed, then
# `python -m benchmarks --quick` into benchmarks/results. Usage: scripts/gpu_check.sh PYTHON [ARGUMENTS OF THE BENCHMARKS]
set -euo pipefail
python=$1
shift
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu-check: there is no CUDA or ROCm device that torch can use here. Run it on a machine with one (and a torch" \
        "build for it); everything that needs none is checked by make test." >&2
    exit 2
fi
"$python" - <<'EOF'
import torch

from fasttfm.kernels.proof.assembler import FAULTS, assembler

if torch.version.cuda:
    major, minor = torch.cuda.get_device_capability()
    used = assembler(10 * major + minor)
    fault = FAULTS.get(used.version, "") if major < 10 else ""
    print(f"sm_{major}{minor} is assembled by ptxas {used.version} ({used.path})", fault)
EOF
FASTTFM_TESTS=all "$python" -m pytest -m gpu -q
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer || true)
if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer is not installed (it comes with the CUDA toolkit): memory and race checks left out"
else
    for check in memcheck racecheck; do
        "$sanitizer" --tool "$check" --error-exitcode 9 --target-processes all \
            "$python" -m pytest -q -x -k sanitized tests/gpu/test_kernels.py
    done
fi
exec "$python" -m benchmarks --quick "$@"
