"""The script for bash, 3.2 and later."""

from collections.abc import Iterable

from gateway.commands.completion.help_text import PROGRAM, Command

_SCRIPT = """\
# Completion of keepgate for bash; written by `keepgate completion bash`.

_keepgate() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} place=keepgate i
    # bash splits --option=value at the equals sign.
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = && $COMP_CWORD -gt 1 ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$place ${COMP_WORDS[i]}" in
            COMMAND_PATHS) place="$place ${COMP_WORDS[i]}" ;;
        esac
    done
    local IFS=$'\\n'
    COMPREPLY=()
    case "$place $previous" in
VALUES
    esac
    local options= commands=
    case $place in
WORDS
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(IFS=' ' compgen -W "$options" -- "$current"))
    elif [[ -n $commands ]]; then
        COMPREPLY=($(IFS=' ' compgen -W "$commands" -- "$current"))
    else
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}

complete -F _keepgate keepgate
"""


def bash_script(program: Command) -> str:
    commands = program.all()
    paths = [command for command in commands if command.path]
    return (
        _SCRIPT.replace("COMMAND_PATHS", " | ".join(f'"{_place(command)}"' for command in paths))
        .replace("VALUES\n", "".join(f"        {line}\n" for command in commands for line in _values(command)))
        .replace("WORDS\n", "".join(f"        {line}\n" for line in map(_words, commands)))
    )


def _place(command: Command) -> str:
    return " ".join((PROGRAM, *command.path))


def _values(command: Command) -> Iterable[str]:
    """What may follow an option that takes a value."""
    for option in command.options:
        if not option.value:
            continue
        if option.choices:
            reply = f'COMPREPLY=($(IFS=\' \' compgen -W "{" ".join(option.choices)}" -- "$current"))'
        elif option.is_file:
            reply = 'compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$current"))'
        elif option.is_folder:
            reply = 'compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$current"))'
        else:
            reply = ":"
        patterns = " | ".join(f'"{_place(command)} {name}"' for name in option.names)
        yield f"{patterns}) {reply}; return ;;"


def _words(command: Command) -> str:
    options = " ".join(name for option in command.options for name in option.names if name.startswith("--"))
    names = " ".join([*(child.path[-1] for child in command.commands), *command.arguments])
    return f'"{_place(command)}") options="{options}" commands="{names}" ;;'
