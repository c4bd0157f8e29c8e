"""`python -m scripts.hub --out DIR`: write the kernels as a package for Hugging Face's `kernels`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError
from scripts.hub.package import VERSION, write_package


def main(argv: Sequence[str] | None = None) -> int:
    """Write the package and list its builds; returns the exit status."""
    parser = Parser(prog="python -m scripts.hub", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the repository")
    add("--repo-id", default="fasttfm/fasttfm", metavar="NAME", help="name on the hub (default: %(default)s)")
    add("--version", type=int, default=VERSION, help="major version on the hub (default: %(default)s)")
    try:
        args = parser.parse_args(argv)
        if args.version < 0:
            raise UserError(f"--version {args.version} was given, it must be a whole number from 0")
        for backend, unique in write_package(args.out, repo_id=args.repo_id, version=args.version).items():
            print(f"{args.out / 'build' / f'torch-{backend}'}: torch.ops.{unique}")
    except UserError as error:
        print(f"python -m scripts.hub: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
