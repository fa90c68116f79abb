"""`keepgate costs`: what answers cost and what hits saved, from a running gateway."""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.commands.amounts import dollars, unpriced_note
from gateway.commands.operator_client import (
    CommandParser,
    OperatorError,
    add_operator_options,
    key_names,
    operator_client,
)
from gateway.commands.table import table

_EXAMPLES = """\
examples:
  keepgate costs
  keepgate costs --by model,key --since 7d
  keepgate costs --by day,team --since 2026-11-01 --until 2026-12-01 --csv
  keepgate costs --by layer --model gpt-4o"""

_COUNTERS = (
    "requests",
    "hits",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost",
    "saving",
    "unpriced",
    "estimated",
)
_FILTERS = ("key", "team", "model", "upstream", "layer")


def run(words: Sequence[str]) -> int:
    """Run `keepgate costs WORDS`; returns the exit status."""
    parsed = _parser().parse_args(words)
    given = {name: getattr(parsed, name) for name in ("by", "since", "until", *_FILTERS)}
    params = {name: value for name, value in given.items() if value is not None}
    try:
        client = operator_client(parsed)
        answer = client.request("GET", "/v1/costs", params)
        names = key_names(client) if "key" in answer["by"] and not (parsed.json or parsed.csv) else {}
    except OperatorError as error:
        print(f"keepgate costs: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        print(json.dumps(answer, indent=2))
    elif parsed.csv:
        writer = csv.DictWriter(sys.stdout, (*answer["by"], *_COUNTERS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(answer["data"])
    else:
        _print_table(answer, names)
    return 0


def _print_table(answer: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """`names` are those of keys by their ids."""
    by = answer["by"]

    def shown(row: Mapping[str, Any], name: str) -> str:
        text = str(row[name])
        return (names.get(text, text) if name == "key" else text) or "-"

    rows = [[shown(row, name) for name in by] + _figures(row) for row in answer["data"]]
    rows.append(["total", *[""] * (len(by) - 1), *_figures(answer["total"])])
    heads = [*(name.upper() for name in by), "REQUESTS", "HITS", "TOKENS", "COST", "SAVING"]
    print("\n".join(table(heads, rows, left=range(len(by)))))
    if unpriced := answer["total"]["unpriced"]:
        print(unpriced_note(unpriced))
    if estimated := answer["total"]["estimated"]:
        print(f"Requests whose tokens are estimated, such as of streams that clients broke off: {estimated:,}")
    for machine in answer["machines"]:
        if machine["dollars_per_1k_tokens"] is not None:
            print(f"{machine['upstream']}: ${machine['dollars_per_1k_tokens']:.6f} for 1,000 tokens, as measured")


def _figures(row: Mapping[str, Any]) -> list[str]:
    tokens = row["prompt_tokens"] + row["completion_tokens"]
    return [
        *(f"{row[name]:,}" for name in ("requests", "hits")),
        f"{tokens:,}",
        *(dollars(row[name], row["unpriced"]) for name in ("cost", "saving")),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="keepgate costs",
        description="What answers cost and what hits saved.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--by", help="some of key, team, model, upstream, layer, day and hour, with commas (model)")
    parser.add_argument("--since", help="such as 24h, 7d, 4w or 2026-11-01, in UTC (7d)")
    parser.add_argument("--until", help="likewise (now)")
    for name in _FILTERS:
        parser.add_argument(f"--{name}", metavar="NAME", help=f"only this {name}")
    parser.add_argument("--csv", action="store_true", help="print rows of CSV")
    add_operator_options(parser)
    return parser
