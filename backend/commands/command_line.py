"""What the commands share: the parser, progress on stderr, broken pipes, and exit statuses of expected errors."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from backend.errors import OUT_OF_MEMORY, EngineLost, ModelError, is_out_of_memory


class Parser(argparse.ArgumentParser):
    """Prints one line for a wrong argument, in place of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def run_command(name: str, command: Callable[[], None], interrupted: str | None = None) -> int:
    """Runs a command and prints one line on stderr for an error that is expected.

    Args:
        name: of the command, which begins the line.
        interrupted: printed at Ctrl-C; None: nothing.

    Returns:
        The exit status: 0, 1 after an expected error (which includes too little memory), 130 after Ctrl-C.
    """
    status = _status(name, command, interrupted)
    if any(thread.name == "nccl-abort" for thread in threading.enumerate()):
        # `Communicator.abort` leaves these to themselves, and they may wait for ever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _status(name: str, command: Callable[[], None], interrupted: str | None) -> int:
    try:
        command()
    except (ModelError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, EngineLost):
            # Not by the interpreter's end: threads of NCCL may wait for ranks that are gone.
            os._exit(1)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"{name}: {OUT_OF_MEMORY}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if interrupted is not None:
            print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    return 0


def progress_printer(name: str) -> Callable[[str], None]:
    """A function that prints a message on stderr, after the name and the seconds since this call."""
    started = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{name} {time.monotonic() - started:5.1f} s] {message}", file=sys.stderr, flush=True)

    return progress


def exit_on_broken_pipe() -> None:
    """Ends the process silently when the reader of its output is gone (``| head -1``), as other commands do."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def ignore_broken_pipe() -> None:
    """Raises an exception for a closed pipe or socket, which is Python's default, in place of ending the process."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
