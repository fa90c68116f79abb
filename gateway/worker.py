"""One worker process of `keepgate serve --workers N`; started by it, not by people."""

import logging
import sys

from gateway.serve import serve_as_worker

if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    sys.exit(serve_as_worker())
