"""The command `keepgate replay`."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from prefix_store.replay.read import read_trace
from prefix_store.replay.replay import replay
from prefix_store.replay.report_text import format_report
from prefix_store.replay.trace import TraceError

_DESCRIPTION = """\
Show what a prefix store of some size would have found of recorded traffic, to choose the size by. TRACE is a file,
plain or gzip, in the style of Mooncake (JSON lines with timestamp, input_length, output_length and hash_ids), of
coding-agent conversations (JSON lines with block_size and requests) or of Azure (CSV with arrivals and lengths, which
does not say what prompts share)."""

_NOTES = """\
A block is found if it is there with all that comes before it. All blocks of a request enter when it arrives, and
answers take no time.

examples:
  keepgate replay conversation.jsonl.gz --capacity 5000,20000
  keepgate replay conversation.jsonl.gz --capacity 20000 --engines 8 --json"""

_PROGRESS_SECONDS = 10.0


class _Parser(argparse.ArgumentParser):
    """Prints an error in one line, with a reference to --help."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    """Run the command; returns the exit status: 2 if an argument or the trace is wrong."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parsed = _parser().parse_args()
    try:
        trace = read_trace(parsed.trace, parsed.block_tokens)
    except TraceError as error:
        for line in error.lines:
            print(f"keepgate replay: {line}", file=sys.stderr)
        return 2
    report = replay(trace, parsed.capacity, parsed.engines, _Progress().say)
    print(json.dumps(report, indent=2) if parsed.json else format_report(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="keepgate replay",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the recorded traffic")
    parser.add_argument(
        "--capacity",
        metavar="BLOCKS",
        type=_capacities,
        default=[],
        help="capacities to simulate, in blocks of the trace, as 5000,20000 (none: a sampled curve only)",
    )
    parser.add_argument(
        "--engines", metavar="N", type=_positive, default=4, help="among how many a capacity is divided for routing (4)"
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        type=_positive,
        help="tokens of a block where the trace does not say it (512 for Mooncake's style, 16 for Azure's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _capacities(text: str) -> list[int]:
    return sorted({_positive(part.strip()) for part in text.split(",")})


class _Progress:
    """A line on stderr every ten seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def say(self, share: float) -> None:
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            print(f"keepgate replay: {share:.0%}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
