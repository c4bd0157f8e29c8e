#!/usr/bin/env bash
# Installs the oldest dependencies that setup.py allows in a separate environment, and runs operators, kernels (in
# Triton's interpreter) and a translation from text to score there. Usage: scripts/oldest.sh PYTHON [FOLDER]
# Downloads torch and its dependencies, some gigabytes; FOLDER is kept and reused.
set -euo pipefail
python=$1
folder=${2:-}
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
test -x "$folder/oldest/bin/python" || "$python" -m venv "$folder/oldest"
pip=("$folder/oldest/bin/python" -m pip install --quiet --disable-pip-version-check)

"$python" - > "$folder/oldest.txt" <<'EOF'
"""The lower bounds of setup.py as versions."""
import setuptools

kept = {}
setuptools.setup = kept.update
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__file__": "setup.py", "__name__": "setup"})
for line in kept["install_requires"]:
    print(line.replace(">=", "=="))  # 2.9 is 2.9.0 to pip
print("#", kept["extras_require"]["hf"][0].replace(">=", "=="))
EOF
cat "$folder/oldest.txt"
"${pip[@]}" --requirement "$folder/oldest.txt" "pytest>=8" "hypothesis>=6.100"
"${pip[@]}" --no-deps .

"$folder/oldest/bin/python" -m pip list 2> /dev/null | grep -i -E '^(torch|triton|numpy|sentencepiece|sacrebleu|safetensors|pyyaml|requests|tqdm) '
cp -r tests "$folder/"  # tests the installed package, not the checkout
cd "$folder"
export PATH="$folder/oldest/bin:$PATH" OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=
python -c "import fasttfm; assert fasttfm.__file__.startswith('$folder'), fasttfm.__file__"
rm -rf text all data model
fasttfm prepare --dataset demo --data-dir text --vocab-size 1000 --out all
for side in en de; do head -n 10 "text/demo/valid.$side" > "valid.$side"; done
fasttfm prepare --src text/demo/train.en --tgt text/demo/train.de --valid-src valid.en --valid-tgt valid.de \
    --vocab-size 1000 --subset 2000 --out data
fasttfm train --preset demo --data data --out model --max-update 5 --warmup-updates 2 --threads 1
head -n 3 text/demo/test.en > in.en
fasttfm translate model < in.en > out.de
head -n 3 text/demo/test.de > ref.de
fasttfm score --ref ref.de < out.de
# Only the first case of every test function: the interpreter is slow.
python -m pytest -q --collect-only tests/test_reference_attention.py tests/test_reference_layers.py \
    tests/functional/test_layer_norm.py tests/functional/test_feed_forward.py \
    tests/kernels/test_cross_entropy_kernel.py > listed.txt
awk -F'[' '/::/ && !seen[$1]++' listed.txt > smoke.txt
python -m pytest -q -x @smoke.txt
# transformers needs newer packages than fasttfm: its oldest version comes last.
"${pip[@]}" "$(sed -n 's/^# //p' oldest.txt)"
python -m pytest -q -x tests/convert/test_auto_model.py -k "takes_each_target_once or under_both_names"
