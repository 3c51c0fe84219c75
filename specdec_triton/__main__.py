"""``python -m specdec_triton``: the command ``specdec-triton``."""

import sys

from specdec_triton.cli import main

if __name__ == "__main__":
    sys.exit(main())
