"""`python -m fasttfm` is the command `fasttfm`."""

import sys

from fasttfm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
