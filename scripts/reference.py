"""MkDocs hook: writes the tables of the reference from the code, where a page has a line `<!-- generated: NAME -->`."""

import argparse
import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from backend.api.metrics import Metrics
from backend.commands.command_line import Parser
from backend.commands.serve import add_arguments
from backend.engine.stats import EngineStats
from cache.semantic.evaluation.__main__ import parser as eval_pairs_parser
from gateway import metrics
from gateway.settings import refusals
from gateway.settings.backend import BackendSettings
from gateway.settings.fields import Secret, Size
from gateway.settings.settings import Settings

_MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every mark of a page. Raises KeyError for a name that no table has."""
    return _MARK.sub(lambda mark: TABLES[mark[1]](), markdown)


def settings_table() -> str:
    """Every setting of `keepgate serve` but those of the backend: YAML key, environment variable, default."""
    lines: list[str] = []
    in_files = set(map(refusals.variable, refusals.secret_paths()))
    groups: list[tuple[str, type[Struct]]] = [("", Settings)]
    groups += [(name, kind) for name, kind, _ in fields_of(Settings) if kind is not BackendSettings and is_group(kind)]
    for group, kind in groups:
        lines += [
            "",
            f"### {group or 'General'}",
            "",
            inspect.getdoc(kind) or "",
            "",
            _head("setting, environment variable"),
        ]
        for name, field, default in fields_of(kind):
            if not is_group(field):
                key = f"{group}.{name}" if group else name
                variable = "KEEPGATE_" + key.upper().replace(".", "_")
                text = f"{descriptions(kind)[name]} *Expected:* {expected(field)}."
                in_file = f"<br>`{variable}_FILE`" if variable in in_files else ""
                lines.append(_row(f"`{key}`<br>`{variable}`{in_file}", shown(default), text))
    return "\n".join(lines)


def backend_table() -> str:
    """Every option of `keepgate backend`, and where it is a setting of `keepgate serve` too, its name there."""
    parser = Parser(prog="keepgate backend")
    add_arguments(parser)
    settings = {name for name, _, _ in fields_of(BackendSettings)}
    lines = ["| option, setting of `keepgate serve` | |", "|---|---|"]
    texts = descriptions(BackendSettings)
    lines += [
        _row(f"`--{name.replace('_', '-')}` of `keepgate serve`<br>`backend.{name}`", texts[name])
        for name in sorted(settings - {action.dest for action in parser._actions})
    ]
    lines += [
        _row(option + (f"<br>`backend.{name}`" if name in settings else ""), text)
        for name, option, text in _options(parser)
    ]
    return "\n".join(lines)


def eval_pairs_table() -> str:
    """Every option of `keepgate eval-pairs`."""
    rows = [_row(option, text) for _, option, text in _options(eval_pairs_parser()) if option]
    return "\n".join(["| option | |", "|---|---|", *rows])


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Of each option: the name of its value, how it is written, what it does."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        option = ", ".join(f"`{word}`" for word in action.option_strings)
        values = ", ".join(f"`{choice}`" for choice in action.choices or ())
        text = parser._get_formatter()._expand_help(action) + (f" *One of* {values}." if values else "")
        yield action.dest, option, text


def gateway_metrics() -> str:
    """Every metric of the gateway."""
    return _metrics_table((m.name, m.type, m.documentation) for m in metrics.registry.collect())


def backend_metrics() -> str:
    """Every metric of the engine; those of its prefix store appear once it has one."""
    counted = [field for field in dataclasses.fields(EngineStats) if field.default_factory is dataclasses.MISSING]
    zeros: dict[str, Any] = dict.fromkeys((field.name for field in counted), 0)
    registry = Metrics(EngineStats(**zeros)).registry
    return _metrics_table((m.name, m.type, m.documentation) for m in registry.collect())


def fields_of(kind: type[Struct]) -> list[tuple[str, Any, Any]]:
    """(name, type, default) of a group of settings."""
    return [(field.name, field.type, field.default) for field in msgspec.structs.fields(kind)]


def is_group(kind: Any) -> bool:
    """Whether a setting is a group of others."""
    return isinstance(kind, type) and issubclass(kind, Struct)


def descriptions(kind: type[Struct]) -> dict[str, str]:
    """The docstring below each field of a group."""
    found: dict[str, str] = {}
    for body in ast.walk(ast.parse(inspect.getsource(kind))):
        if isinstance(body, ast.ClassDef):
            for field, text in zip(body.body, body.body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                        found[name] = " ".join(words.split())
    return found


def expected(kind: Any) -> str:
    """What an error message says that a value should be."""
    if get_origin(kind) is not Annotated:
        return str(kind)
    texts = [meta.description for meta in get_args(kind)[1:] if isinstance(meta, Meta) and meta.description]
    return texts[-1] if texts else expected(get_args(kind)[0])


def shown(default: Any) -> str:
    """A default as it would be written in YAML."""
    if default is None or default in ((), ""):
        return "none"
    if isinstance(default, Secret):
        return "`***`"
    if isinstance(default, Size):
        return next(f"`{default // unit}{name}`" for unit, name in (*_UNITS, (1, "B")) if default % unit == 0)
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _head(first: str) -> str:
    return f"| {first} | default | |\n|---|---|---|"


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _metrics_table(found: Iterator[tuple[str, str, str]]) -> str:
    lines = ["| metric | type | |", "|---|---|---|"]
    for name, kind, text in sorted(found):
        lines.append(_row(f"`{name}{'_total' if kind == 'counter' else ''}`", kind, text))
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "backend-options": backend_table,
    "eval-pairs-options": eval_pairs_table,
    "gateway-metrics": gateway_metrics,
    "backend-metrics": backend_metrics,
}
