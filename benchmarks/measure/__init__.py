"""Timing, checks and records."""

from importlib.util import find_spec

for _package in ("jsonschema", "matplotlib", "pandas", "psutil"):
    if find_spec(_package) is None:
        raise SystemExit(f'benchmarks: {_package} is not installed: pip install "./fasttfm[bench]"')
