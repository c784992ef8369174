"""`python -m torchsmith aot ...`: the command line."""

import sys

from .aot.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
