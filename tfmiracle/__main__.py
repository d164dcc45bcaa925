"""`python -m tfmiracle`, the same as the command `tfmiracle`."""

import sys

from tfmiracle.cli import main

if __name__ == "__main__":
    sys.exit(main())
