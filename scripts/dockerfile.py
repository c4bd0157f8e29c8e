"""Runs the steps of Dockerfile without Docker, in a virtual environment below a folder.

Usage: scripts/dockerfile.py FOLDER [--with-system-steps] [--build-arg NAME=VALUE ...], or --dry-run

FOLDER is the root of the image for copied files; the Python is the one that runs this script. Steps that change the
system (apt-get, useradd) only run with --with-system-steps.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_THE_SYSTEM = ("apt-get", "useradd")
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "dist", "demo", "runs", "__pycache__")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, argument) pairs in order, with continued lines joined."""
    joined = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines() if line.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--with-system-steps", action="store_true")
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.folder is None and not args.dry_run:
        parser.error("give a FOLDER or --dry-run")
    folder = (args.folder or Path(".")).resolve()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if not args.dry_run:
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        environment["PATH"] = f"{folder / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    entry: list[str] = []
    for name, argument in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        if name == "ARG":
            environment.setdefault(*argument.split("=", 1))
            environment.update(given.split("=", 1) for given in args.build_arg)
        elif name in ("ENTRYPOINT", "CMD"):
            entry += ast.literal_eval(argument)
        elif name == "COPY" and not args.dry_run:
            source, target = argument.split()
            shutil.copytree(ROOT / source, folder / target.lstrip("/"), symlinks=True, ignore=NOT_COPIED)
        elif name == "RUN":
            skipped = argument.startswith(OF_THE_SYSTEM) and not args.with_system_steps
            print(f"RUN {argument}{'   (skipped: changes the system)' if skipped else ''}", flush=True)
            if not skipped and not args.dry_run:
                command = re.sub(r"(?<=[ \"])/src", f"{folder}/src", argument)
                subprocess.run(["sh", "-c", command], env=environment, cwd=folder, check=True)
    print(f"ENTRYPOINT {' '.join(entry)}", flush=True)
    return 0 if args.dry_run else subprocess.run(entry, env=environment, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
