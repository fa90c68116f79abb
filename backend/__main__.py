"""``python -m backend``: the engine alone, as its own process."""

import sys

from backend.commands.serve import main

if __name__ == "__main__":
    sys.exit(main())
