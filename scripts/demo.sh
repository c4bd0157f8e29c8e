#!/usr/bin/env bash
# From no data to a scored translation, with the commands for real corpora, each printed before it runs.
# Usage: scripts/demo.sh FASTTFM OUT      (see make demo)
set -euo pipefail
fasttfm=$1
out=$2

run() {
    printf '\n$ fasttfm'
    printf ' %q' "$@"
    printf '\n'
    "$fasttfm" "$@"
}

began=$SECONDS
mkdir -p "$out"
run prepare --dataset demo --data-dir "$out" --vocab-size 2000 --out "$out/data"
run train --preset demo --data "$out/data" --out "$out/model"
printf '\n$ fasttfm translate %q < %q > %q\n' "$out/model" "$out/demo/test.en" "$out/test.de"
"$fasttfm" translate "$out/model" < "$out/demo/test.en" > "$out/test.de"
printf '\n$ fasttfm score --ref %q < %q\n' "$out/demo/test.de" "$out/test.de"
"$fasttfm" score --ref "$out/demo/test.de" < "$out/test.de"
run plot "$out/model" --attention "$(head -n 1 "$out/demo/test.en")" --out "$out/attention.png"

printf '\nFive sentences it had never seen\n'
for line in 1 2 3 4 5; do
    printf '  source       %s\n' "$(sed -n "${line}p" "$out/demo/test.en")"
    printf '  translation  %s\n' "$(sed -n "${line}p" "$out/test.de")"
    printf '  reference    %s\n\n' "$(sed -n "${line}p" "$out/demo/test.de")"
done
printf 'model            %s\n' "$out/model"
printf 'loss curve       %s\n' "$out/model/curve.png"
printf 'attention        %s\n' "$out/attention.png"
printf 'whole demo       %d s\n' $((SECONDS - began))
