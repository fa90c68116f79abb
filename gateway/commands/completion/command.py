"""The command: prints the script for a shell."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from gateway.commands.completion.bash import bash_script
from gateway.commands.completion.fish import fish_script
from gateway.commands.completion.help_text import Command, read_commands
from gateway.commands.completion.zsh import zsh_script

_SCRIPTS: Mapping[str, Callable[[Command], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
_DESCRIPTION = """\
Print a script that completes the commands and options of keepgate, and their values. It takes some seconds to write,
so keep it in a file; write it again after an upgrade, or after an extra was installed."""
_NOTES = """\
examples:
  keepgate completion bash > ~/.local/share/bash-completion/completions/keepgate
  keepgate completion zsh > ~/.zfunc/_keepgate      with `fpath+=~/.zfunc` before compinit in ~/.zshrc
  keepgate completion fish > ~/.config/fish/completions/keepgate.fish"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def run(words: Sequence[str]) -> int:
    """Print the script; returns the exit status."""
    parser = _Parser(
        prog="keepgate completion",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=list(_SCRIPTS), help="for which shell")
    shell = parser.parse_args(words).shell
    program = read_commands()
    if not program.commands:
        print("keepgate completion: `keepgate --help` could not be read", file=sys.stderr)
        return 1
    print(_SCRIPTS[shell](program), end="")
    return 0
