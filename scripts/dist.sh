#!/usr/bin/env bash
# Builds dist/*.whl and dist/*.tar.gz, runs README's commands in a clone below an empty folder, and tries the wheels there.
# Usage: scripts/dist.sh PYTHON [UPDATES [FOLDER]]
# UPDATES: updates of README's training (default: 40; complete: 1400). TORCH_INDEX: another package index for PyTorch.
# FOLDER, with its environment, is kept and reused.
set -euo pipefail
python=$1
updates=${2:-40}
folder=${3:-}
root=$PWD
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
export PIP_CONSTRAINT="$root/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
typed() { # runs a command line; prints the last line of its output, or all if it fails
    printf '$ %s\n' "$1"
    eval "$1" > "$folder/said.txt" 2>&1 < /dev/null || { cat "$folder/said.txt"; exit 1; }
    tail -n 1 "$folder/said.txt" | cut -c 1-200
}
refused() { # runs a command that must fail with this install command in its message
    eval "$1" > "$folder/said.txt" 2>&1 && { echo "$1 must fail: its package is not installed"; exit 1; }
    grep -F "$2" "$folder/said.txt"
}

test -x "$folder/build/bin/python" || "$python" -m venv "$folder/build"
test -x "$folder/user/bin/python" || "$python" -m venv "$folder/user"
"$folder/build/bin/pip" install build
rm -rf dist
for source in . pretraining; do
    typed "'$folder/build/bin/python' -m build --outdir dist $source"
done

export PATH="$folder/user/bin:$PATH"
if [ -n "${TORCH_INDEX:-}" ]; then pip install --index-url "$TORCH_INDEX" torch; fi
rm -rf "$folder/empty"
mkdir "$folder/empty"
git clone --quiet "$root" "$folder/empty/fasttfm"
"$python" - "$root/README.md" "$updates" "$folder" > "$folder/words.txt" << 'END'
import re, sys
from pathlib import Path
text = Path(sys.argv[1]).read_text(encoding="utf-8")
for number, (language, block) in enumerate(re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
    if language:
        file = Path(sys.argv[3], f"block{number}.{language}")
        file.write_text(block, encoding="utf-8")
        print(f"python {file}")
        continue
    for line in block.splitlines():
        words = re.split(r"\s+#\s", line)[0]
        words += f" --max-update {sys.argv[2]}" if words.startswith("fasttfm train") else ""
        # compare may find a regression on a busy machine, and prints their number
        words += " | grep regressions" if " compare " in words else ""
        print(words)
END
cd "$folder/empty/fasttfm"
mapfile -t lines < "$folder/words.txt"
for line in "${lines[@]}"; do typed "$line"; done

cd "$folder/empty"
refused "fasttfm lm train" "pip install ./fasttfm/pretraining"
refused "fasttfm serve MODEL" 'pip install "./fasttfm[serve]"'
typed 'pip install "./fasttfm[serve]" ./fasttfm/pretraining'
typed "fasttfm lm --help"
typed "pip install --no-deps --force-reinstall '$root'/dist/*.whl"
typed "head -n 1 text/demo/test.en | fasttfm translate MODEL"
typed "fasttfm lm --help"
python -c "import fasttfm, fasttfm.kernels; assert fasttfm.__file__.startswith('$folder/user'), fasttfm.__file__"
ls -l "$root"/dist
