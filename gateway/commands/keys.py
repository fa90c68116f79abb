"""`keepgate keys`: virtual keys and teams of a running gateway, by its admin API."""

import argparse
import datetime
import json
import re
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.commands.amounts import dollars
from gateway.commands.operator_client import CommandParser, OperatorError, add_operator_options, operator_client
from gateway.commands.table import table

Json = dict[str, Any]
Ask = Callable[..., Json]

_EXAMPLES = """\
examples:
  keepgate keys teams web --budget-per-month 200
  keepgate keys create alice --team web --requests-per-minute 60 --models gpt-4o-mini
  keepgate keys limits alice --tokens-per-minute 100000 --requests-per-minute none
  keepgate keys rotate alice --grace 1d
  keepgate keys revoke alice"""

# The options of limits, with how each is shown.
_LIMITS: dict[str, tuple[Callable[[str], float], Callable[[float], str]]] = {
    "requests_per_minute": (int, "{:,} requests/min".format),
    "tokens_per_minute": (int, "{:,} tokens/min".format),
    "concurrent_requests": (int, "{:,} at once".format),
    "budget_per_day": (float, lambda limit: f"{dollars(limit)}/day"),
    "budget_per_month": (float, lambda limit: f"{dollars(limit)}/month"),
}
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def run(words: Sequence[str]) -> int:
    """Run `keepgate keys WORDS`; returns the exit status."""
    parsed = _parser().parse_args(words)
    try:
        parsed.run(operator_client(parsed).request, parsed)
    except OperatorError as error:
        print(f"keepgate keys: {error}", file=sys.stderr)
        return 1
    return 0


# What each command does


def _create(ask: Ask, parsed: argparse.Namespace) -> None:
    body = {"name": parsed.name, "limits": _limits(parsed), **_rules(parsed)}
    if parsed.team:
        body["team"] = parsed.team
    _show_secret(ask("POST", "/v1/keys", body=body), parsed)


def _list(ask: Ask, parsed: argparse.Namespace) -> None:
    answer = ask("GET", "/v1/keys")
    if not parsed.all:
        answer["data"] = [key for key in answer["data"] if not key["revoked"]]
    heads = ("NAME", "ID", "TEAM", "STATE", "LIMITS", "MODELS")
    rows = [
        (key["name"], key["id"], key["team"], _state(key), _summary(key["limits"]), ", ".join(key["models"]) or "all")
        for key in answer["data"]
    ]
    _show(answer, parsed, lambda: print("\n".join(table(heads, rows, left=range(len(heads))))))
    if not parsed.json and rows:
        _warn_of_unused(answer)


def _revoke(ask: Ask, parsed: argparse.Namespace) -> None:
    answer = ask("DELETE", _path("keys", parsed.key))
    _show(answer, parsed, lambda: print(f"{answer['name']} is revoked"))


def _rotate(ask: Ask, parsed: argparse.Namespace) -> None:
    _show_secret(ask("POST", _path("keys", parsed.key, "rotate"), body={"grace": parsed.grace}), parsed)


def _change(ask: Ask, parsed: argparse.Namespace) -> None:
    body = {"limits": _limits(parsed), **_rules(parsed)}
    has_changes = len(body) > 1 or body["limits"]
    path = _path("keys", parsed.key)
    answer = ask("PATCH", path, body=body) if has_changes else ask("GET", path)
    _show(
        answer, parsed, lambda: print(f"{answer['name']}: {'; '.join((_summary(answer['limits']), *_shown(answer)))}")
    )


def _teams(ask: Ask, parsed: argparse.Namespace) -> None:
    answer = ask("GET", "/v1/teams")
    limits = _limits(parsed)
    if parsed.name is not None:
        known = {team["name"]: team for team in answer["data"]}
        answer = known.get(parsed.name, {"limits": {}})
        if limits or parsed.name not in known:
            answer = ask("PUT", _path("teams", parsed.name), body={"limits": {**answer["limits"], **limits}})
    rows = [(team["name"], _summary(team["limits"])) for team in answer.get("data", [answer])]
    _show(answer, parsed, lambda: print("\n".join(table(("TEAM", "LIMITS"), rows, left=(0, 1)))))


# What is sent


def _limits(parsed: argparse.Namespace) -> Json:
    """The limits that were named; None for `none`."""
    given = {name: getattr(parsed, name) for name in _LIMITS}
    return {name: None if limit == "none" else limit for name, limit in given.items() if limit is not None}


def _rules(parsed: argparse.Namespace) -> Json:
    given = {name: getattr(parsed, name) for name in ("expires", "namespace", "cache", "priority")}
    rules = {name: None if rule == "never" else rule for name, rule in given.items() if rule is not None}
    if parsed.models is not None:
        rules["models"] = [] if parsed.models == ["all"] else parsed.models
    return rules


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)


# What is shown


def _show(answer: Json, parsed: argparse.Namespace, print_text: Callable[[], None]) -> None:
    if parsed.json:
        print(json.dumps(answer, indent=2))
    else:
        print_text()


def _show_secret(answer: Json, parsed: argparse.Namespace) -> None:
    """The secret alone on standard output, so that it can be piped."""
    if not parsed.json:
        print(f"{answer['name']} ({answer['id']}); its secret is shown this once:", file=sys.stderr)
        _warn_of_unused(answer)
    _show(answer, parsed, lambda: print(answer["secret"]))


def _warn_of_unused(answer: Json) -> None:
    if not answer["required"]:
        print(
            "warning: this gateway asks for no keys, so none is recognised and no limit or budget holds. Set"
            " keys.required (KEEPGATE_KEYS_REQUIRED=true).",
            file=sys.stderr,
        )


def _state(key: Json) -> str:
    if key["revoked"]:
        return "revoked"
    if key["expires"] is None:
        return "valid"
    expires = datetime.datetime.fromtimestamp(key["expires"], datetime.UTC)
    is_over = expires <= datetime.datetime.now(datetime.UTC)
    return f"{'expired' if is_over else 'until'} {expires:%Y-%m-%d %H:%M}"


def _summary(limits: Mapping[str, float | None]) -> str:
    shown = [form(limit) for name, (_, form) in _LIMITS.items() if (limit := limits[name]) is not None]
    return ", ".join(shown) or "none"


def _shown(key: Json) -> list[str]:
    """The rules of a key that are not as they are by default."""
    rules = {
        "models": ", ".join(key["models"]),
        "namespace": key["namespace"],
        "cache": "" if key["cache"] == "use" else key["cache"],
        "priority": key["priority"],
    }
    shown = [f"{name} {rule}" for name, rule in rules.items() if rule]
    return shown if _state(key) == "valid" else [*shown, _state(key)]


# Options


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="keepgate keys",
        description="Virtual keys and teams of a running gateway.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    create = _command(commands, "create", _create, "make a key; its secret is printed once")
    create.add_argument("name", help="a name that no other key has")
    create.add_argument("--team", help="whose limits hold for it as well; it must be there")
    _add_limits(create)
    _add_rules(create)
    listing = _command(commands, "list", _list, "list keys")
    listing.add_argument("--all", action="store_true", help="revoked ones too")
    _add_key(_command(commands, "revoke", _revoke, "make a key invalid at once"))
    rotate = _command(commands, "rotate", _rotate, "give a key a new secret, which is printed once")
    _add_key(rotate)
    rotate.add_argument(
        "--grace", type=_duration, default=0, metavar="TIME", help="for how long the old one holds, such as 12h (0)"
    )
    limits = _command(commands, "limits", _change, "show or change the limits and rules of a key")
    _add_key(limits)
    _add_limits(limits)
    _add_rules(limits)
    teams = _command(commands, "teams", _teams, "list teams, or make one or change its limits")
    teams.add_argument("name", nargs="?", help="the team")
    _add_limits(teams)
    return parser


def _command(commands: Any, name: str, run_command: Callable[[Ask, argparse.Namespace], None], text: str) -> Any:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    command.set_defaults(run=run_command)
    add_operator_options(command)
    return command


def _add_key(command: argparse.ArgumentParser) -> None:
    command.add_argument("key", metavar="KEY", help="its name or id")


def _add_limits(command: argparse.ArgumentParser) -> None:
    for name, (kind, _) in _LIMITS.items():
        unit = "USD" if kind is float else "N"
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=_limit(kind), metavar=unit, help="or none for no such limit")


def _add_rules(command: argparse.ArgumentParser) -> None:
    command.add_argument("--models", nargs="+", metavar="MODEL", help="the only models that it may use, or all")
    command.add_argument("--expires", type=_expiry, metavar="TIME", help="such as 30d, 2027-01-31, or never")
    command.add_argument("--namespace", metavar="NAME", help="keys with the same one share answers")
    command.add_argument("--cache", choices=("use", "read-only", "bypass"), help="what it may do with the cache")
    command.add_argument("--priority", type=int, metavar="N", help="of its requests; lower numbers come first")


def _limit(kind: Callable[[str], float]) -> Callable[[str], float | str]:
    def limit(text: str) -> float | str:
        if text == "none":
            return text
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected a number or none, got {text!r}") from error

    return limit


def _duration(text: str) -> float:
    """Seconds of a text such as 90, 15m, 12h or 30d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 15m, 12h or 30d, got {text!r}")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _expiry(text: str) -> float | str:
    """Unix seconds of a date in UTC, or of a time from now."""
    if text == "never":
        return text
    now = datetime.datetime.now(datetime.UTC)
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        try:
            return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no day of the calendar") from error
    try:
        return now.timestamp() + _duration(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 12h or 30d, a date such as 2027-01-31, or never, got {text!r}"
        ) from error
