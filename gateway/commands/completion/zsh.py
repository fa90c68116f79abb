"""The script for zsh."""

import re
from collections.abc import Iterable

from gateway.commands.completion.help_text import PROGRAM, Command, Option

_HEAD = """\
#compdef keepgate
# Completion of keepgate for zsh; written by `keepgate completion zsh`.
"""
_TAIL = """
if [[ $funcstack[1] == _keepgate ]]; then  # loaded from a file _keepgate in $fpath
    _keepgate "$@"
else
    compdef _keepgate keepgate
fi
"""


def zsh_script(program: Command) -> str:
    return _HEAD + "".join(map(_function, program.all())) + _TAIL


def _function(command: Command) -> str:
    specs = [spec for option in command.options for spec in _specs(option)]
    if not command.commands:
        rest = f"1: :({' '.join(command.arguments)})" if command.arguments else "*: :_files"
        lines = " \\\n        ".join([*specs, _quoted(rest)])
        return f"\n{_name(command)}() {{\n    _arguments -s \\\n        {lines}\n}}\n"
    lines = " \\\n        ".join([*specs, "'1: :->command'", "'*:: :->rest'"])
    names = "\n".join(f"                {_described(child)}" for child in command.commands)
    rest = "\n".join(f"                {child.path[-1]}) {_name(child)} ;;" for child in command.commands)
    return f"""
{_name(command)}() {{
    local curcontext=$curcontext state line
    typeset -A opt_args
    _arguments -C -s \\
        {lines}
    case $state in
        command)
            local -a names
            names=(
{names}
            )
            _describe -t commands command names
            ;;
        rest)
            case $line[1] in
{rest}
            esac
            ;;
    esac
}}
"""


def _name(command: Command) -> str:
    return "_".join(("", PROGRAM, *command.path)).replace("-", "_")


def _described(child: Command) -> str:
    name, about = child.path[-1], child.help.replace("\\", "\\\\").replace(":", "\\:")
    return _quoted(f"{name}:{about}")


def _specs(option: Option) -> Iterable[str]:
    """One for each name, as `_arguments` reads them; an option may be given again."""
    about = re.sub(r"([\\\[\]:])", r"\\\1", option.help)
    for name in option.names:
        if not option.value:
            yield _quoted(f"*{name}[{about}]")
            continue
        # A long option takes its value after a space or an equals sign.
        sign = "=" if name.startswith("--") else ""
        yield _quoted(f"*{name}{sign}[{about}]:{_label(option)}:{_action(option)}")


def _label(option: Option) -> str:
    return "value" if option.choices else re.sub(r"[^A-Za-z0-9_-]", " ", option.value)


def _action(option: Option) -> str:
    if option.choices:
        return f"({' '.join(option.choices)})"
    if option.is_file:
        return "_files"
    return "_files -/" if option.is_folder else " "


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
