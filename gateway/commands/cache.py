"""`keepgate cache`: what is in the cache of a running gateway, what it does, and why a request is a miss."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gateway.commands.amounts import dollars, unpriced_note
from gateway.commands.operator_client import (
    CommandParser,
    OperatorClient,
    OperatorError,
    add_operator_options,
    key_names,
    operator_client,
)
from gateway.commands.table import table

_EXAMPLES = """\
examples:
  keepgate cache stats --by model --window 5m
  keepgate cache ls --order hits
  keepgate cache show public.0123456789abcdef0123456789abcdef
  keepgate cache explain request.json              why this request would be a hit or a miss; - is standard input
  keepgate cache warm questions.jsonl --key sk-…   compute answers before anybody asks, at low priority
  keepgate cache decisions --verdict different     what the semantic cache decided, and what the judge said of it
  keepgate cache what-if --delta 0.005,0.02        what it would serve with other budgets of wrong answers
  keepgate cache purge --model gpt-4o
  keepgate cache top                               figures and the hottest entries, again each two seconds"""

_CLEAR = "\x1b[H\x1b[2J"
_WINDOW_NAMES = {"1m": "a minute", "5m": "five minutes", "1h": "an hour", "all": "all time"}
_WINDOWS = tuple(_WINDOW_NAMES)
_FILTERS = ("model", "namespace", "key", "layer", "tag", "min_age", "max_age", "min_hits", "order", "text")
_PAGE = ("limit", "cursor")
_DECISION_FILTERS = ("outcome", "verdict", "namespace", "key", "model")
_SCOPES = ("model", "namespace", "tag", "layer", "min_age", "tenant")
_ID_SHOWN = 44
_BAR = 30
_MAIN_FEATURES = 4
_POLL_SECONDS = 0.5
_DONE = ("completed", "failed", "expired", "cancelled")
_COUNT_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def run(words: Sequence[str]) -> int:
    """Run `keepgate cache WORDS`; returns the exit status."""
    parser = _parser()
    parsed = parser.parse_args(words)
    if parsed.command is None:
        parser.print_help()
        return 2
    try:
        client = operator_client(parsed)
        status: int = parsed.run(client, parsed)
        return status
    except (OperatorError, OSError, ValueError) as error:
        print(f"keepgate cache {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _stats(client: OperatorClient, parsed: argparse.Namespace) -> int:
    params = {"by": parsed.by, "window": parsed.window} if parsed.by else {}
    answer = client.request("GET", "/v1/cache/stats", params)
    if parsed.json:
        print(json.dumps(answer, indent=2))
        return 0
    _print_lines(_figures_of(answer))
    if parsed.by and not (rows := answer["by"]["data"]):
        print(f"\nNo request with a {parsed.by} in {_WINDOW_NAMES[parsed.window]}.")
    elif parsed.by:
        print()
        names = key_names(client) if parsed.by == "key" else {}
        heads = (parsed.by.upper(), "REQUESTS", "HITS", "HIT RATE", "TOKENS", "SAVED", "COST", "SAVED $")
        _print_lines(table(heads, [[names.get(row["name"], row["name"]), *_row(row)] for row in rows]))
    return 0


def _figures_of(answer: Mapping[str, Any]) -> list[str]:
    """The windows side by side, a line for each figure."""
    windows = answer["windows"]
    if not windows:
        return ["The shared store does not answer: there are no figures of time."]
    columns = [windows[name] for name in _WINDOWS]
    rows: list[tuple[str, Callable[[Any], str]]] = [
        ("requests", lambda each: _count(each["requests"])),
        ("hit rate", lambda each: _share(each["hit_rate"])),
        ("  exact", lambda each: _share(each["layers"]["exact"]["hit_rate"])),
        ("  normalized", lambda each: _share(each["layers"]["normalized"]["hit_rate"])),
        ("  semantic", lambda each: _share(each["layers"]["semantic"]["hit_rate"])),
        ("shared calls", lambda each: _count(each["shared"])),
        ("computed", lambda each: _count(each["computed"])),
        ("bypasses", lambda each: _count(each["bypasses"])),
        ("cache failures", lambda each: _count(each["failures"])),
        ("errors", lambda each: _count(each["errors"])),
        ("first byte, hit, p50 / p99", lambda each: _durations(each["first_byte"]["hit"])),
        ("first byte, miss, p50 / p99", lambda each: _durations(each["first_byte"]["miss"])),
        ("between tokens, p50 / p99", lambda each: _durations(each["between_tokens"])),
        ("tokens saved", lambda each: _count(_tokens(each["saved"]))),
        ("time saved", lambda each: _seconds(each["saved"]["seconds"])),
        ("cost", lambda each: dollars(each["cost"], each["unpriced"])),
        ("saved", lambda each: dollars(each["saved"]["dollars"], each["unpriced"])),
    ]
    entries = sum(each["entries"] for each in answer["ages"])
    cells = [[name, *map(shown, columns)] for name, shown in rows]
    noun = "entry" if entries == 1 else "entries"
    unpriced = windows["all"]["unpriced"]
    notes = [unpriced_note(unpriced) + " (all time)"] if unpriced else []
    return [*table(["", *_WINDOWS], cells), *notes, "", f"{entries:,} {noun}; {_ages(answer['ages'])}"]


def _ages(classes: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        f"{each['entries']:,} {'up to ' + _seconds(each['up_to']) if each['up_to'] is not None else 'older'}"
        for each in classes
        if each["entries"]
    ]
    return "by age: " + (", ".join(parts) or "none")


def _row(row: Mapping[str, Any]) -> list[str]:
    return [
        _count(row["requests"]),
        _count(row["hits"]),
        _share(row["hit_rate"]),
        _count(row["prompt_tokens"] + row["completion_tokens"]),
        _count(_tokens(row["saved"])),
        dollars(row["cost"], row["unpriced"]),
        dollars(row["saved"]["dollars"], row["unpriced"]),
    ]


def _ls(client: OperatorClient, parsed: argparse.Namespace) -> int:
    params = {name: value for name in (*_FILTERS, *_PAGE) if (value := getattr(parsed, name)) is not None}
    answer = client.request("GET", "/v1/cache/entries", params)
    if parsed.json:
        print(json.dumps(answer, indent=2))
        return 0
    _print_entries(answer["data"])
    if answer["next"] is not None:
        print(f"There are more: --cursor {answer['next']!r}")
    return 0


def _print_entries(entries: Sequence[Mapping[str, Any]]) -> None:
    if not entries:
        print("No entry.")
        return
    heads = ("ID", "MODEL", "HITS", "AGE", "BYTES", "TOKENS", "TOOK", "OPTIONS")
    rows = [
        [
            each["id"],
            each["model"],
            "-" if each["hits"] is None else _count(each["hits"]),
            _seconds(each["age"]) + (" (stale)" if each["stale"] else ""),
            _count(each["bytes"]),
            _count(_tokens(each["cost"])),
            _seconds(each["cost"]["seconds"]),
            " ".join(f"{name}={value}" for name, value in each["options"].items()),
        ]
        for each in entries
    ]
    _print_lines(table(heads, rows, left=(0, 1, 7)))


def _show(client: OperatorClient, parsed: argparse.Namespace) -> int:
    answer = client.request("GET", f"/v1/cache/entries/{parsed.id}")
    if parsed.json:
        print(json.dumps(answer, indent=2))
        return 0
    for name in ("id", "model", "family", "upstream", "hits", "content_type", "bytes", "messages"):
        print(f"{name:14}{answer[name]}")
    print(f"{'age':14}{_seconds(answer['age'])} of {_seconds(answer['fresh_for'])}")
    cost = answer["cost"]
    tokens = f"{cost['prompt_tokens']:,} prompt tokens, {cost['completion_tokens']:,} completion tokens"
    price = "" if cost["dollars"] is None else f", {dollars(cost['dollars'])}"
    print(f"{'cost':14}{tokens}, {_seconds(cost['seconds'])}{price}")
    for name, value in answer["options"].items():
        print(f"{name:14}{value}")
    print()
    print(json.dumps(answer["answer"], indent=2, ensure_ascii=False))
    return 0


def _explain(client: OperatorClient, parsed: argparse.Namespace) -> int:
    body = _request_in(parsed.file)
    params = {name: value for name in ("path", "namespace", "key") if (value := getattr(parsed, name)) is not None}
    if parsed.bearer is not None:
        if named := params.keys() & {"namespace", "key"}:
            raise OperatorError(f"--bearer says whose request it is; leave out --{min(named)}")
        client = OperatorClient(parsed.url, bearer=parsed.bearer)
    answer = client.request("POST", "/v1/cache/explain", params, body)
    if parsed.json:
        print(json.dumps(answer, indent=2))
        return 0
    print(f"key       {answer['key']}")
    for layer in answer["layers"]:
        risk = "" if layer["risk"] is None else f" (risk {layer['risk']:.4f})"
        print(f"{layer['layer']:10}{layer['verdict']}: {layer['reason']}{risk}")
        if layer["features"]:
            print(f"{'':10}log odds of a wrong answer: {_features(layer['features'])}")
    if not answer["nearest"] and any(layer["verdict"] == "miss" for layer in answer["layers"]):
        print(f"\nNo entry of the tenant {answer['namespace']} was asked much the same.")
    for namespace in answer["elsewhere"]:
        print(f"\nAnother tenant has the answer: --namespace {namespace} explains its request, as --bearer KEY does")
    for near in answer["nearest"]:
        entry = near["entry"]
        notes = [f"{_seconds(entry['age'])} old"]
        if near["similarity"] is not None:
            notes.append(f"similarity {near['similarity']:.3f}")
        if near["has_answer"] is not None:
            notes.append("has the likeliest answer" if near["has_answer"] else "has another answer")
        if near["veto"]:
            notes.append(f"veto: {near['veto']}")
        print(f"\n{entry['id']}  {entry['model']}, {', '.join(notes)}")
        for difference in near["differences"] or ():
            print(f"  {_difference(difference)}")
        if near["differences"] is None:
            print("  it does not know its request")
    return 0


def _request_in(file: str) -> Any:
    """The request in a file, JSON; "-" is standard input. Raises OperatorError."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OperatorError(f"{file} is no text in UTF-8") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise OperatorError(f"{file} is no JSON: {error}") from error


def _difference(difference: Mapping[str, Any]) -> str:
    field, here, there = (difference.get(name) for name in ("field", "here", "there"))
    match difference["change"]:
        case "added":
            return f"{field}: only in this request" + ("" if here is None else f" ({json.dumps(here)})")
        case "removed":
            return f"{field}: only in the entry's" + ("" if there is None else f" ({json.dumps(there)})")
        case _ if here is None and there is None:
            return f"{field}: differs"
        case _ if here == there:
            return f"{field}: another text ({here})"
        case _:
            return f"{field}: {json.dumps(here)} here, {json.dumps(there)} there"


def _decisions(client: OperatorClient, parsed: argparse.Namespace) -> int:
    params = {name: value for name in (*_DECISION_FILTERS, *_PAGE) if (value := getattr(parsed, name)) is not None}
    answer = client.request("GET", "/v1/cache/semantic/decisions", params)
    if parsed.json:
        print(json.dumps(answer, indent=2))
        return 0
    if not answer["data"]:
        print("No decision near a stored question.")
        return 0
    heads = (
        "TIME",
        "OUTCOME",
        "REASON",
        "VERDICT",
        "SIMILARITY",
        "RISK",
        "LIMIT",
        "MODEL",
        "NAMESPACE",
        "ENTRY",
        "WHY",
    )
    _print_lines(table(heads, [_decision_row(each) for each in answer["data"]], left=(0, 1, 2, 3, 7, 8, 9, 10)))
    for each in answer["data"]:
        if each["question"] is not None:
            print(f"\n{each['question']}\n{each['stored_question']}")
    if answer["next"] is not None:
        print(f"There are more: --cursor {answer['next']}")
    return 0


def _decision_row(decision: Mapping[str, Any]) -> list[str]:
    return [
        time.strftime("%H:%M:%S", time.localtime(decision["time"])),
        decision["outcome"],
        decision["reason"] or "-",
        f"{decision['verdict']} ({decision['source']})" if decision["verdict"] else "-",
        f"{decision['similarity']:.3f}",
        *("-" if decision[name] is None else f"{decision[name]:.2g}" for name in ("risk", "limit")),
        decision["model"],
        decision["namespace"],
        decision["entry"],
        (f"veto {decision['veto']}; " if decision["veto"] else "") + _features(decision["features"][:_MAIN_FEATURES]),
    ]


def _features(features: Sequence[Mapping[str, Any]]) -> str:
    """What each adds to the log odds that the answer is wrong."""
    return ", ".join(f"{feature['name']} {feature['log_odds']:+.2f}" for feature in features)


def _what_if(client: OperatorClient, parsed: argparse.Namespace) -> int:
    params = {name: value for name in ("delta", "step", "steps") if (value := getattr(parsed, name)) is not None}
    answer = client.request("GET", "/v1/cache/semantic/what-if", params)
    if parsed.json:
        print(json.dumps(answer, indent=2))
        return 0
    if not answer["data"]:
        print("The semantic cache keeps no budget: semantic.mode is off, or semantic.policy is another one.")
        return 0
    heads = ("DELTA", "REQUESTS", "HITS", "HIT RATE", "JUDGED", "FOUND WRONG", "WRONG", "AT MOST", "")
    rows = [
        [
            f"{each['delta']:g}",
            _count(each["requests"]),
            _count(each["hits"]),
            _share(each["hits"] / each["requests"]) if each["requests"] else "-",
            _count(each["judged"]),
            _count(each["found_wrong"]),
            f"{each['wrong']:.2%}",
            f"{each['wrong_upper']:.2%}",
            "as set" if each["delta"] == answer["delta"] else "",
        ]
        for each in answer["data"]
    ]
    _print_lines(table(heads, rows, left=(8,)))
    return 0


def _purge(client: OperatorClient, parsed: argparse.Namespace) -> int:
    if parsed.id:
        params = {"reason": "wrong"} if parsed.wrong else {}
        answer = client.request("DELETE", f"/v1/cache/entries/{parsed.id}", params)
    else:
        if parsed.wrong:
            raise OperatorError("--wrong is said of one entry: give its ID")
        names = [name for name in _SCOPES if getattr(parsed, name) is not None]
        if len(names) + parsed.all != 1:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in (*_SCOPES, "all"))
            raise OperatorError(f"say what to purge: an ID, or one of {options}")
        answer = client.request("DELETE", "/v1/cache", {name: getattr(parsed, name) for name in names})
    if parsed.json:
        print(json.dumps(answer, indent=2))
    elif "erased" in answer:
        print(f"{answer['removed']:,} keys removed; {answer['remaining']:,} are left.")
    elif parsed.wrong:
        print(f"Deleted as wrong; the semantic cache has {answer['labels']:,} labels of it.")
    else:
        print("Purged." if not parsed.id else "Deleted.")
    return 0


def _warm(client: OperatorClient, parsed: argparse.Namespace) -> int:
    tenant = OperatorClient(parsed.url, bearer=parsed.key or "")
    params = {} if parsed.path is None else {"path": parsed.path}
    with _opened(parsed.file) as lines:
        batch = tenant.send_lines("/v1/cache/warm", params, lines)
    while batch["status"] not in _DONE:
        if not parsed.json:
            _print_progress(batch)
        time.sleep(_POLL_SECONDS)
        batch = tenant.request("GET", f"/v1/batches/{batch['id']}")
    if parsed.json:
        print(json.dumps(batch, indent=2))
    else:
        _print_progress(batch)
        print(f"\n{batch['id']} {batch['status']}.")
        for error in (batch.get("errors") or {}).get("data") or ():
            print(f"  {error['message']}")
    counts = batch["request_counts"]
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1


def _opened(file: str) -> BinaryIO:
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise OperatorError(f"{file} cannot be read: {error.strerror}") from error


def _print_progress(batch: Mapping[str, Any]) -> None:
    counts = batch["request_counts"]
    total, done = counts["total"], counts["completed"] + counts["failed"]
    full = _BAR * done // total if total else 0
    failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
    line = f"[{'#' * full}{'.' * (_BAR - full)}] {done:,} of {total:,}{failed}"
    print(f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def _top(client: OperatorClient, parsed: argparse.Namespace) -> int:
    shown = 0
    while True:
        stats = client.request("GET", "/v1/cache/stats")
        hottest = client.request("GET", "/v1/cache/entries", {"order": "hits", "limit": str(parsed.limit)})
        if parsed.json:
            print(json.dumps({"windows": stats["windows"], "hottest": hottest["data"]}), flush=True)
        else:
            print(_CLEAR if sys.stdout.isatty() else "", end="")
            _print_lines([*_figures_of(stats), ""])
            _print_entries(hottest["data"])
        shown += 1
        if parsed.times and shown >= parsed.times:
            return 0
        time.sleep(parsed.every)


def _print_lines(lines: Sequence[str]) -> None:
    print("\n".join(lines))


def _tokens(of: Mapping[str, Any]) -> int:
    tokens: int = of["prompt_tokens"] + of["completion_tokens"]
    return tokens


def _count(number: float) -> str:
    for unit, name in _COUNT_UNITS:
        if number >= 10 * unit:
            return f"{number / unit:.1f}{name}"
    return f"{number:,.0f}"


def _share(share: float) -> str:
    return f"{share:.1%}"


def _durations(found: Mapping[str, float | None]) -> str:
    return " / ".join("-" if found[name] is None else _seconds(found[name] or 0.0) for name in ("p50", "p99"))


def _seconds(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    if seconds >= 1 or not seconds:
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="keepgate cache",
        description="What is in the cache of a running gateway, what it does, and why a request is a miss.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def command(
        name: str, does: str, run: Callable[[OperatorClient, argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False)
        made.set_defaults(run=run)
        add_operator_options(made)
        return made

    stats = command("stats", "show hit rates, durations and savings, of a minute to all time", _stats)
    stats.add_argument("--by", choices=("model", "key", "namespace"), help="a row for each as well")
    stats.add_argument("--window", choices=_WINDOWS, default="1h", help="of these rows (1h)")
    ls = command("ls", "list entries, the newest first", _ls)
    for name, says in (
        ("model", "only of this model"),
        ("namespace", "only of this namespace"),
        ("key", "only of this virtual key, by its id or name"),
        ("layer", "exact, or semantic: only what may answer similar questions"),
        ("tag", "only answers to requests with this tag in x-keepgate-tags"),
        ("min-age", "at least so many seconds old"),
        ("max-age", "at most so many seconds old"),
        ("min-hits", "served at least so often"),
        ("order", "newest or hits"),
        ("text", "only answers with this text"),
        ("limit", "at most so many (50)"),
        ("cursor", "go on where a listing ended"),
    ):
        ls.add_argument(f"--{name}", metavar=name.upper().replace("-", "_"), help=says)
    show = command("show", "show an entry with its answer", _show)
    show.add_argument("id", metavar="ID", help="as in x-keepgate-entry")
    explain = command("explain", "say why a request would be a hit or a miss", _explain)
    explain.add_argument("file", metavar="FILE", help="the body of the request, JSON; - is standard input")
    explain.add_argument("--path", help="the endpoint (/v1/chat/completions)")
    explain.add_argument("--namespace", help="of the tenant that would send it")
    explain.add_argument("--key", help="the virtual key that would send it, by its id or name")
    explain.add_argument("--bearer", metavar="KEY", help="the API key of the app that would send it")
    decisions = command("decisions", "list the semantic cache's last decisions, the newest first", _decisions)
    for name, says in (
        ("outcome", "served, observed (would be served), vetoed or refused"),
        ("verdict", "same, different or unsure: what the judge said of the fresh answer"),
        ("namespace", "only of this namespace"),
        ("key", "only of this virtual key, by its id or name"),
        ("model", "only stored answers of this model"),
        ("limit", "at most so many (50)"),
        ("cursor", "go on where a listing ended"),
    ):
        decisions.add_argument(f"--{name}", metavar=name.upper(), help=says)
    what_if = command("what-if", "show what the semantic cache would serve with other budgets", _what_if)
    what_if.add_argument("--delta", metavar="SHARES", help="shares of wrong answers with commas between")
    what_if.add_argument("--step", choices=("1m", "1h"), help="of the points in the JSON (1h)")
    what_if.add_argument("--steps", metavar="N", help="how many points (24)")
    purge = command("purge", "forget an entry, those of a model, tag or tenant, old ones, or all", _purge)
    purge.add_argument("id", metavar="ID", nargs="?", help="one entry")
    purge.add_argument("--wrong", action="store_true", help="its answer was wrong: the semantic cache learns from it")
    purge.add_argument("--model", help="all of a model")
    purge.add_argument("--namespace", help="all of a namespace")
    purge.add_argument("--tag", help="the answers to requests with this tag in x-keepgate-tags")
    purge.add_argument("--layer", choices=("semantic",), help="answer no similar question from what is there now")
    purge.add_argument("--min-age", metavar="SECONDS", help="what is at least so old")
    purge.add_argument("--tenant", metavar="NAMESPACE", help="erase all that is stored of a namespace, and count it")
    purge.add_argument("--all", action="store_true", help="everything")
    warm = command("warm", "compute answers before anybody asks, at low priority", _warm)
    warm.add_argument("file", metavar="FILE", help="JSON Lines: one request on each")
    warm.add_argument("--key", metavar="KEY", help="the client's key: answers are kept for who sends it")
    warm.add_argument("--path", help="the endpoint (/v1/chat/completions)")
    top = command("top", "show figures and the hottest entries again and again", _top)
    top.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often (2)")
    top.add_argument("--times", type=int, default=0, metavar="N", help="how many times (until interrupted)")
    top.add_argument("--limit", type=int, default=10, metavar="N", help="entries (10)")
    return parser
