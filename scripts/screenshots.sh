#!/usr/bin/env bash
# Screenshots of the site's first page, built by `make docs`, at 1280 and 390 pixels. Usage: scripts/screenshots.sh CHROMIUM
# The page is in a frame, because Chromium opens no window as narrow as a telephone.
set -euo pipefail
for width in 1280 390; do
    printf '<body style="margin:0"><iframe src="site/index.html" style="border:0;width:%dpx;height:1500px">' "$width" > build/frame.html
    "$1" --headless --no-sandbox --hide-scrollbars --allow-file-access-from-files --virtual-time-budget=5000 \
        --window-size="$width,1500" --screenshot="docs/images/site-$width.png" "file://$PWD/build/frame.html" 2> build/frame.log
done
