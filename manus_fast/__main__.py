"""python -m manus_fast: the command line, where the script `manus-fast` is not on the path."""

import sys

from manus_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
