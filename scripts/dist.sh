#!/usr/bin/env bash
# Builds dist/*.whl and dist/*.tar.gz, and types the words of README in an empty folder, with the wheel where they say
# ./fasttfm. What a message tells to install is installed too. Usage: scripts/dist.sh PYTHON
set -euo pipefail
python=$1
root=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIP_CONSTRAINT="$root/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1

"$python" -m venv "$folder/build"
"$folder/build/bin/pip" install build
rm -rf dist
for source in . pretraining; do
    "$folder/build/bin/python" -m build --outdir dist "$source" > "$folder/build.log" || { cat "$folder/build.log"; exit 1; }
done

"$python" -m venv "$folder/user"
export PATH="$folder/user/bin:$PATH"
wheel=$(echo "$root"/dist/fasttfm-*.whl)
mkdir "$folder/empty"
cd "$folder/empty"
ln -s "$root" REPOSITORY
pip install "$wheel"
fasttfm lm train 2> said.txt && { echo "lm needs a distribution that is not installed"; exit 1; }
grep -F "pip install ./fasttfm/pretraining" said.txt
fasttfm serve model 2> said.txt && { echo "serve needs an extra that is not installed"; exit 1; }
grep -F 'pip install "./fasttfm[serve]"' said.txt

python - "$root/README.md" "$wheel" > words.sh << 'END'
import re, sys
text = open(sys.argv[1], encoding="utf-8").read()
for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
    words = re.sub(r'install "?\./fasttfm(\[[\w,]+\])?"?', lambda found: f'install "{sys.argv[2]}{found[1] or ""}"', block)
    # compare may find a row slower where other programs run meanwhile
    words = re.sub(r"^(python -m benchmarks compare \S+ \S+)", r"\1 || test $? = 1", words, flags=re.MULTILINE)
    print(f"python - << 'END'\n{block}END" if language else words)
END
bash -euxo pipefail words.sh
pip install ./fasttfm/pretraining "$wheel[serve]"
fasttfm lm --help > /dev/null
python -c "import fasttfm, fasttfm.kernels; assert fasttfm.__file__.startswith('$folder/user'), fasttfm.__file__"
ls -l "$root"/dist
