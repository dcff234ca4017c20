"""``python -m fastensor``."""

import sys

from fastensor.cli import main

if __name__ == "__main__":
    sys.exit(main())
