"""The script for fish."""

from collections.abc import Iterable

from gateway.commands.completion.help_text import Command, Option

_HEAD = """\
# Completion of keepgate for fish; written by `keepgate completion fish`.

set -g __keepgate_commands COMMAND_PATHS

function __keepgate_at --description 'Whether these are the commands before the cursor'
    set -l found
    for word in (commandline -opc)[2..-1]
        if contains -- (string join -- ' ' $found $word) $__keepgate_commands
            set -a found $word
        end
    end
    test "$found" = "$argv"
end

complete -c keepgate -f
"""


def fish_script(program: Command) -> str:
    commands = program.all()
    paths = " ".join(_quoted(" ".join(command.path)) for command in commands if command.path)
    return _HEAD.replace("COMMAND_PATHS", paths) + "".join(f"{line}\n" for each in commands for line in _lines(each))


def _lines(command: Command) -> Iterable[str]:
    at = f"complete -c keepgate -n {_quoted(' '.join(('__keepgate_at', *command.path)))}"
    for child in command.commands:
        yield f"{at} -a {child.path[-1]} -d {_quoted(child.help)}"
    if command.arguments:
        yield f"{at} -a {_quoted(' '.join(command.arguments))}"
    elif not command.commands:
        yield f"{at} -F"
    for option in command.options:
        yield f"{at} {' '.join(_names(option))}{_value(option)} -d {_quoted(option.help)}"


def _names(option: Option) -> Iterable[str]:
    for name in option.names:
        yield f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"


def _value(option: Option) -> str:
    if not option.value:
        return ""
    if option.choices:
        return f" -x -a {_quoted(' '.join(option.choices))}"
    if option.is_file:
        return " -r -F"
    return " -x -a '(__fish_complete_directories)'" if option.is_folder else " -x"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
