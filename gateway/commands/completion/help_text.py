"""The commands and options that `--help` lists, in argparse's form."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

PROGRAM = "keepgate"
_SECONDS = 60.0
_AT_ONCE = 4
# So wide that nothing but an option with a long name is broken.
_COLUMNS = 10_000
_NAME = r"-[^ ,]+(?: (?:\{[^}]*\}|[^ ,]+))*"
_OPTION = re.compile(rf"  (?P<names>{_NAME}(?:, {_NAME})*)(?:  +(?P<help>\S.*))?")
_COMMAND = re.compile(r"    (?P<name>[a-z][a-z-]*)(?:  +(?P<help>\S.*))?")
_ARGUMENT = re.compile(r"  \{(?P<names>[^{}]+)\}(?:  +.*)?")
_SEE = re.compile(r"; see `.* --help`$")
_CHOICES = re.compile(r"\{(?P<names>[^{}]+)\}")
_FILES = {"FILE", "PATH", "PATH_OR_ID", "TRACE", "SCRIPT", "OUT"}
_FOLDERS = {"FOLDER", "DIR", "DIRECTORY"}


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its `names`, the words that its value may be, and what else its value is ("" for no value)."""

    names: tuple[str, ...]
    value: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return self.value in _FILES

    @property
    def is_folder(self) -> bool:
        return self.value in _FOLDERS


@dataclass(slots=True)
class Command:
    """A command by its `path`, such as ("keys", "create"); () is the program itself."""

    path: tuple[str, ...]
    help: str
    options: list[Option] = field(default_factory=list)
    commands: list["Command"] = field(default_factory=list)
    arguments: tuple[str, ...] = ()
    """What its first argument may be; () for anything, such as a file."""

    def all(self) -> list["Command"]:
        """This command and all below it."""
        return [self, *(each for command in self.commands for each in command.all())]


def read_commands() -> Command:
    """The program with everything below it. A command whose extra is not installed has no options."""
    program = Command((), "")
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        waiting = [program]
        while waiting:
            for command, text in zip(waiting, threads.map(_help_of, waiting), strict=True):
                read_help(command, text)
            waiting = [child for command in waiting for child in command.commands]
    return program


def read_help(command: Command, text: str) -> None:
    """Put the options, commands and arguments that a help lists into the command that has printed it."""
    # Examples stand last, in lines that might look like those of commands.
    text = re.split(r"^examples?:$", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = text.splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if option := _OPTION.fullmatch(line):
            command.options.append(_option(option["names"], option["help"] or below.strip()))
        elif named := _COMMAND.fullmatch(line):
            about = _SEE.sub("", named["help"] or below.strip())
            command.commands.append(Command((*command.path, named["name"]), about))
        elif argument := _ARGUMENT.fullmatch(line):
            command.arguments = tuple(argument["names"].split(","))


def _option(names: str, about: str) -> Option:
    """`names` as argparse has them: `-h, --help`, `--port N`, `--models MODEL [MODEL ...]`."""
    parts = [part.split(" ", 1) for part in names.split(", -")]
    spelled = tuple(("" if number == 0 else "-") + part[0] for number, part in enumerate(parts))
    value = next((part[1] for part in parts if len(part) > 1), "")
    choices = _CHOICES.match(value)
    return Option(
        spelled,
        value.split(" ")[0],
        " ".join(about.split()),
        tuple(choices["names"].split(",")) if choices else (),
    )


def _help_of(command: Command) -> str:
    """What it prints; nothing where it cannot."""
    # -P: the installed package, not one in the current directory.
    words = [sys.executable, "-P", "-m", "gateway", *command.path, "--help"]
    environment = {**os.environ, "COLUMNS": str(_COLUMNS)}
    done = subprocess.run(  # noqa: S603  # our own program
        words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    return done.stdout if done.returncode == 0 else ""
