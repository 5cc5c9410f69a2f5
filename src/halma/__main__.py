"""``python -m halma``."""

import sys

from halma.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
