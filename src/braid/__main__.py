"""`python -m braid`, the same as `braid`."""

import sys

from braid.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
