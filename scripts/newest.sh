#!/usr/bin/env bash
# Installs the newest versions of all dependencies, without pins, in a separate environment, and runs the tests that
# depend on them (tests/newest.py). Usage: scripts/newest.sh PYTHON [FOLDER]
# Downloads torch and its dependencies, some gigabytes; TORCH_INDEX: index of PyTorch's CPU wheels, a third the size.
# FOLDER is kept, and updated the next time.
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
