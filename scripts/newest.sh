#!/usr/bin/env bash
# Installs the newest versions of all that fasttfm and its tests need, without pins, in an environment of its own, and runs
# there what depends on them (tests/newest.py). Usage: scripts/newest.sh PYTHON [FOLDER]
# It downloads torch with all that comes with it, some gigabytes; TORCH_INDEX: the index of PyTorch's wheels for CPUs, a
# third the size. A FOLDER is kept, and brought up to date the next time.
set -euo pipefail
python=$1
folder=${2:-}
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
test -x "$folder/newest/bin/python" || "$python" -m venv "$folder/newest"
newest=$folder/newest/bin/python
pip=("$newest" -m pip install --quiet --disable-pip-version-check --upgrade)
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
"${pip[@]}" --upgrade-strategy eager --editable ptx-check --editable '.[dev]' --editable pretraining
"$newest" -m tests.newest --workers "${WORKERS:-2}"
