"""One worker process of `keepgate serve --workers N`; started by it, not by people."""

import sys

from gateway.processes.shared_metrics import join_metrics


def main() -> int:
    """Returns the exit status."""
    join_metrics()
    # Only now: these make the counters.
    from gateway.processes.serve import run_until_signalled
    from gateway.processes.workers import work

    return run_until_signalled(work)


if __name__ == "__main__":
    sys.exit(main())
