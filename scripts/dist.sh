#!/usr/bin/env bash
# Builds dist/*.whl and dist/*.tar.gz, installs the wheels in a new environment in a folder elsewhere, and goes from text
# to a translation and to a language model there, and through the benchmarks' smoke form. Usage: scripts/dist.sh PYTHON
set -euo pipefail
python=$1
root=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m venv "$folder/build"
"$folder/build/bin/pip" install --quiet --disable-pip-version-check build
rm -rf dist
for source in . pretraining; do
    "$folder/build/bin/python" -m build --outdir dist "$source" > "$folder/build.log" || { cat "$folder/build.log"; exit 1; }
done

"$python" -m venv "$folder/user"
"$folder/user/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt dist/fasttfm-*.whl
cp -r benchmarks "$folder/benchmarks"
cd "$folder"
export PATH="$folder/user/bin:$PATH"
fasttfm prepare --dataset demo --data-dir . --vocab-size 1000 --out data
fasttfm train --preset demo --data data --out model --max-update 20 --warmup-updates 4 --threads 1
head -n 3 demo/test.en | fasttfm translate model
fasttfm plot model --attention "a dog" --out dog.png 2> said.txt && { echo "plot needs an extra that is not installed"; exit 1; }
grep -F 'pip install "fasttfm[plots]"' said.txt
fasttfm lm train 2> said.txt && { echo "lm needs a distribution that is not installed"; exit 1; }
grep -F "pip install ./pretraining" said.txt
pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" "$root"/dist/fasttfm_pretraining-*.whl
fasttfm lm prepare --text demo/valid.en --bytes --out letters
fasttfm lm train --preset gpt-tiny --data letters --out gpt --max-update 2 --warmup-updates 1 --threads 1
python -c "import fasttfm, fasttfm.kernels; assert fasttfm.__file__.startswith('$folder'), fasttfm.__file__"
python -m benchmarks --list 2> said.txt && { echo "the benchmarks need an extra that is not installed"; exit 1; }
grep -F 'pip install "fasttfm[bench]"' said.txt
pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" "$(echo "$root"/dist/fasttfm-*.whl)[bench]"
python -m benchmarks --smoke --only LayerNorm --out results kernels > /dev/null
ls -l "$root"/dist
