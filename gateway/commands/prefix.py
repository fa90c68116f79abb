"""`keepgate prefix`: what the prefix stores of a running gateway's upstreams hold, have saved, and have decided."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.commands.operator_client import (
    CommandParser,
    OperatorClient,
    OperatorError,
    add_operator_options,
    operator_client,
)
from gateway.commands.table import table

_EXAMPLES = """\
examples:
  keepgate prefix stats
  keepgate prefix lookup request.json --bearer sk-…   where the prompt's KV blocks are; - is standard input
  keepgate prefix clear --model Qwen3-8B"""

_PATH = "/v1/cache/prefix"
_NONE = "-"
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def run(words: Sequence[str]) -> int:
    """Run `keepgate prefix WORDS`; returns the exit status, 1 where no upstream has a prefix store."""
    parser = _parser()
    parsed = parser.parse_args(words)
    if parsed.command is None:
        parser.print_help()
        return 2
    try:
        answer: dict[str, Any] = parsed.ask(operator_client(parsed, getattr(parsed, "bearer", "")), parsed)
    except OperatorError as error:
        print(f"keepgate prefix {parsed.command}: {error}", file=sys.stderr)
        return 1
    upstreams = answer["upstreams"]
    lines = [json.dumps(answer, indent=2)] if parsed.json else parsed.lines(upstreams)
    print("\n".join(lines))
    return 0 if any("error" not in given for given in upstreams.values()) else 1


def _stats(client: OperatorClient, parsed: argparse.Namespace) -> dict[str, Any]:
    return client.request("GET", _PATH)


def _stats_lines(upstreams: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            url,
            tier,
            _count(figures.get("blocks")),
            _capacity(figures),
            _count(figures.get("tokens_saved")),
            _count(figures.get("hits")),
            _count(figures.get("misses")),
        ]
        for url, given in upstreams.items()
        for tier, figures in given.get("tiers", {}).items()
    ]
    heads = ("UPSTREAM", "TIER", "BLOCKS", "SIZE", "TOKENS SAVED", "HITS", "MISSES")
    lines = table(heads, rows, left=(0, 1)) if rows else []
    return [*lines, *(line for url, given in upstreams.items() for line in _decisions(url, given))]


def _decisions(url: str, given: Mapping[str, Any]) -> list[str]:
    """What is said of one upstream below the table."""
    if (error := _error(given)) is not None:
        return [f"{url}: {error}"]
    asked, saved, decisions = given.get("tokens_asked"), given.get("tokens_saved"), given.get("decisions", {})
    parts = [f"{_count(saved)} of {_count(asked)} prompt tokens saved"] if asked is not None else []
    for name in ("fetched", "computed"):
        blocks = decisions.get(f"{name}_blocks") or {}
        parts += [f"{name}: {_amounts(blocks)}"] if any(blocks.values()) else []
    if decisions.get("late_fetches"):
        parts.append(f"{_count(decisions['late_fetches'])} fetched too late")
    return [f"{url}: {'; '.join(parts)}"] if parts else []


def _lookup(client: OperatorClient, parsed: argparse.Namespace) -> dict[str, Any]:
    return client.request("POST", f"{_PATH}/lookup", body=_prompt_in(parsed.file))


def _lookup_lines(upstreams: Mapping[str, Any]) -> list[str]:
    found = {url: given for url, given in upstreams.items() if "error" not in given}
    tiers = list(dict.fromkeys(tier for given in found.values() for tier in given["leading_tokens"]))
    rows = [
        [url, _count(given["tokens"]), *(_count(given["leading_tokens"].get(tier)) for tier in tiers)]
        for url, given in found.items()
    ]
    lines = table(("UPSTREAM", "TOKENS", *map(str.upper, tiers)), rows) if rows else []
    others = [
        f"{url}: tokens {run['from']:,} to {run['to']:,} at {', '.join(run['names'])}"
        for url, given in found.items()
        for run in given.get("engines") or ()
    ]
    return [*lines, *others, *_errors(upstreams)]


def _clear(client: OperatorClient, parsed: argparse.Namespace) -> dict[str, Any]:
    return client.request("DELETE", _PATH, {"model": parsed.model} if parsed.model else None)


def _clear_lines(upstreams: Mapping[str, Any]) -> list[str]:
    cleared = [
        f"{url}: {_count(given['removed'])} blocks removed" for url, given in upstreams.items() if "error" not in given
    ]
    return [*cleared, *_errors(upstreams)]


def _prompt_in(file: str) -> dict[str, Any]:
    """What is looked up of a request in a file, JSON; "-" is standard input. Raises OperatorError."""
    try:
        fields = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise OperatorError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise OperatorError(f"{file} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise OperatorError(f"{file} is no request, a JSON object with a prompt or messages")
    return fields


def _errors(upstreams: Mapping[str, Any]) -> list[str]:
    return [f"{url}: {error}" for url, given in upstreams.items() if (error := _error(given)) is not None]


def _error(given: Mapping[str, Any]) -> str | None:
    return given["error"]["message"] if "error" in given else None


def _amounts(amounts: Mapping[str, int]) -> str:
    """Counts with their names, without those that are 0."""
    return ", ".join(f"{name} {_count(count)}" for name, count in amounts.items() if count)


def _count(number: int | None) -> str:
    return _NONE if number is None else f"{number:,}"


def _capacity(figures: Mapping[str, Any]) -> str:
    """What a tier has in use of what it may: bytes, or blocks."""
    if (used := figures.get("bytes")) is not None:
        of = figures.get("capacity_bytes")
        return _bytes(used) if of is None else f"{_bytes(used)} of {_bytes(of)}"
    blocks = figures.get("capacity_blocks")
    return _NONE if blocks is None else f"of {blocks:,} blocks"


def _bytes(number: int) -> str:
    return next((f"{number / size:.1f} {unit}" for size, unit in _UNITS if number >= size), f"{number} B")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="keepgate prefix",
        description="What the prefix stores of a running gateway's upstreams hold, have saved, and have decided.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def command(
        name: str,
        does: str,
        ask: Callable[[OperatorClient, argparse.Namespace], dict[str, Any]],
        lines: Callable[[Mapping[str, Any]], list[str]],
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False)
        made.set_defaults(ask=ask, lines=lines)
        add_operator_options(made)
        return made

    command("stats", "show what each tier holds and has saved, and what was decided", _stats, _stats_lines)
    lookup = command("lookup", "say which tokens of a prompt are where", _lookup, _lookup_lines)
    lookup.add_argument("file", metavar="FILE", help="a request with a prompt or messages, JSON; - is standard input")
    lookup.add_argument(
        "--bearer", metavar="KEY", default="", help="the API key of the app whose prompt it is (blocks of no tenant)"
    )
    clear = command("clear", "empty the tiers of all upstreams, or of those of a model", _clear, _clear_lines)
    clear.add_argument("--model", help="only of the upstreams that have this model")
    return parser
