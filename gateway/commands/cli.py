"""The command `keepgate`. Light at import: `keepgate --help` loads nothing of the gateway."""

import argparse
import contextlib
import difflib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gateway import __version__

if TYPE_CHECKING:
    from gateway.settings.settings import Settings

_DESCRIPTION = """\
A caching gateway in front of LLM backends. Point a chat app's base URL at it:
every answer is computed at most once."""

_EXAMPLES = """\
examples:
  keepgate serve                                   the small in-repo model, nothing else needed
  keepgate serve --upstream http://gpu:8000/v1     in front of any OpenAI-compatible server
  keepgate serve --upstream mock:                  a scripted upstream, to try an app without a model
  keepgate doctor                                  what would keep the gateway from running well here
  keepgate keys create alice --budget-per-month 20 a key for a client, where the setting keys.required is true
  keepgate costs --by team,model                   what answers cost and hits saved
  keepgate cache stats                             hit rates, durations and savings
  keepgate cache explain request.json              why this request is a hit or a miss
  keepgate prefix stats                            what the upstreams' prefix stores hold and have saved
  keepgate backend --model ./Llama-3.2-1B          the decode engine alone
  keepgate plan ./Llama-3.2-1B --memory 24GB       what fits a device: weights, KV memory, batch
  keepgate quantize ./Llama-3.2-1B --method gptq --bits 4 --calibration text.txt --out ./Llama-3.2-1B-int4
  keepgate train-medusa ./Llama-3.2-1B --text text.txt --out heads   heads that make answers faster
  keepgate eval ./Llama-3.2-1B-int4 --text test.txt --reference ./Llama-3.2-1B     what that has lost
  keepgate profile --requests questions.jsonl      where time and memory of the engine go, and what bounds its speed
  keepgate eval-pairs pairs.csv                    what a semantic cache would do on your questions
  keepgate replay trace.jsonl --capacity 5000      what a prefix store of that many blocks would have found
  keepgate simulate --trace trace.jsonl            what a fleet of gateways, Redis nodes and backends would do

`keepgate serve --help` lists the options."""

_BACKEND_MODULES = {
    "backend": "backend",
    "plan": "backend.commands.plan",
    "quantize": "backend.commands.quantize",
    "train-medusa": "backend.commands.train_medusa",
    "eval": "backend.commands.eval",
    "profile": "backend.commands.profile",
}
"""Commands of the backend, and what runs them."""

_SERVE_DESCRIPTION = """\
Run the gateway until Ctrl-C. Apps use http://HOST:PORT/v1 as their base URL.
Without --upstream it also runs the in-repo backend on a small chat model."""

_SERVE_NOTES = """\
Every setting may also stand in a YAML file or in the environment; the command line wins, then the environment:
  port: 9000              KEEPGATE_PORT=9000
  upstreams: [URL, URL]   KEEPGATE_UPSTREAMS=URL,URL
  cache: {ttl: 3600}      KEEPGATE_CACHE_TTL=3600      how long an answer is fresh, in seconds
  admin_key: ...          KEEPGATE_ADMIN_KEY=...       asked for by /v1/cache/*; needed beyond loopback
  backend: {threads: 4}   KEEPGATE_BACKEND_THREADS=4   the options of `keepgate backend`, for the one it runs

examples:
  keepgate serve --port 9000
  keepgate serve --model ./Qwen3-1.7B --quantization int4 --kv-memory 4GiB
  keepgate serve --upstream http://gpu-1:8000/v1 --upstream http://gpu-2:8000/v1 --redis redis://cache:6379/0
  keepgate serve --config keepgate.yaml --workers 4"""


_DOCTOR_DESCRIPTION = """\
Check what `keepgate serve` with the same options, file and environment needs: the port, Redis, the model and the
kernels, the machine, the clock, the disk, the settings and the upstreams. Nothing is changed. The exit status is 1
where a problem is found, and 0 where there are warnings at most."""

_DOCTOR_NOTES = """\
examples:
  keepgate doctor --config keepgate.yaml
  keepgate doctor --upstream http://gpu:8000/v1 --redis redis://cache:6379/0 --json"""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    # A closed pipe (`keepgate --help | head -1`) ends the command quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _BACKEND_MODULES:
        return _run_backend(words[0], words[1:])
    if words[:1] == ["eval-pairs"]:
        return _run_evaluation(words[1:])
    if words[:1] == ["keys"]:
        from gateway.commands.keys import run as run_keys

        return run_keys(words[1:])
    if words[:1] == ["costs"]:
        from gateway.commands.costs import run as run_costs

        return run_costs(words[1:])
    if words[:1] == ["cache"]:
        from gateway.commands.cache import run as run_cache

        return run_cache(words[1:])
    if words[:1] == ["prefix"]:
        from gateway.commands.prefix import run as run_prefix

        return run_prefix(words[1:])
    if words[:1] == ["route"]:
        from gateway.commands.route import main as run_route

        return run_route(words[1:])
    if words[:1] == ["simulate"]:
        from gateway.commands.simulation.command import main as run_simulation

        return run_simulation(words[1:])
    if words[:1] == ["completion"]:
        from gateway.commands.completion.command import run as run_completion

        return run_completion(words[1:])
    if words[:1] == ["replay"]:
        return _run_replay(words[1:])
    parser, commands = _parsers()
    if not words:
        parser.print_help()
        return 2
    if not words[0].startswith("-") and words[0] not in commands:
        parser.error(f"{words[0]!r} is not a command" + _suggestion(words[0], list(commands)))
    parsed, rest = parser.parse_known_args(words)
    if rest:
        _refuse(commands[parsed.command] if parsed.command in ("serve", "doctor") else parser, rest[0])
    if parsed.command is None:
        parser.error("a command is missing")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a server continues when a client closes a socket
    try:
        return _doctor(parsed) if parsed.command == "doctor" else _serve(parsed)
    except KeyboardInterrupt:  # before the gateway had taken over the signal
        return 130


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="keepgate",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"keepgate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    serve = commands.add_parser(
        "serve",
        help="run the gateway",
        description=_SERVE_DESCRIPTION,
        epilog=_SERVE_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_serve_options(serve)
    doctor = commands.add_parser(
        "doctor",
        help="check what `keepgate serve` needs, with the same options",
        description=_DOCTOR_DESCRIPTION,
        epilog=_DOCTOR_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument(
        "--paid-requests",
        action="store_true",
        help="ask each upstream for one token too, which costs money where it bills",
    )
    _add_serve_options(doctor)
    backend = commands.add_parser("backend", help="run the decode engine alone; see `keepgate backend --help`")
    plan = commands.add_parser("plan", help="print what of a model fits a device's memory; see `keepgate plan --help`")
    quantize = commands.add_parser(
        "quantize", help="make a model with weights in fewer bits; see `keepgate quantize --help`"
    )
    train_medusa = commands.add_parser(
        "train-medusa", help="train heads that make answers faster; see `keepgate train-medusa --help`"
    )
    evaluate = commands.add_parser(
        "eval", help="show how well a model predicts a text, and what fewer bits lose; see `keepgate eval --help`"
    )
    profile = commands.add_parser(
        "profile", help="show where time and memory of the engine go; see `keepgate profile --help`"
    )
    pairs = commands.add_parser(
        "eval-pairs", help="show what a semantic cache would do on your questions; see `keepgate eval-pairs --help`"
    )
    replay = commands.add_parser(
        "replay", help="show what a prefix store would have found of recorded traffic; see `keepgate replay --help`"
    )
    keys = commands.add_parser("keys", help="virtual keys, teams and limits; see `keepgate keys --help`")
    costs = commands.add_parser("costs", help="what answers cost and hits saved; see `keepgate costs --help`")
    cache = commands.add_parser(
        "cache", help="what is in the cache, what it does, and why a request is a miss; see `keepgate cache --help`"
    )
    prefix = commands.add_parser("prefix", help="what upstreams' prefix stores hold; see `keepgate prefix --help`")
    completion = commands.add_parser(
        "completion", help="print a script for the completion of a shell; see `keepgate completion --help`"
    )
    route = commands.add_parser("route", help="simulate routing strategies on a trace; see `keepgate route --help`")
    simulation = commands.add_parser(
        "simulate", help="simulate gateways, Redis and backends on a trace; see `keepgate simulate --help`"
    )
    return parser, {
        "serve": serve,
        "doctor": doctor,
        "backend": backend,
        "plan": plan,
        "quantize": quantize,
        "train-medusa": train_medusa,
        "eval": evaluate,
        "profile": profile,
        "eval-pairs": pairs,
        "replay": replay,
        "keys": keys,
        "costs": costs,
        "cache": cache,
        "prefix": prefix,
        "route": route,
        "completion": completion,
        "simulate": simulation,
    }


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    """The settings that the command line has; the destinations are their names."""
    parser.add_argument(
        "--upstream",
        action="append",
        dest="upstreams",
        metavar="URL",
        help="an OpenAI-compatible server, or mock: or mock:FILE.yaml; may be given again",
    )
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (127.0.0.1; 0.0.0.0 for all)")
    parser.add_argument("--port", metavar="N", help="port to listen on, 0 for any free one (8080)")
    parser.add_argument("--workers", metavar="N", help="processes that share the port (1)")
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="where answers are shared and kept: a Redis URL, `embedded` for a Valkey of its own (the default), or"
        " `none` for memory only",
    )
    parser.add_argument(
        "--semantic",
        metavar="{off,observe,on}",
        dest="semantic.mode",
        help="answers to questions asked before in other words; observe counts them, and serves none (off)",
    )
    parser.add_argument(
        "--state-dir",
        metavar="FOLDER",
        help="where the embedded Valkey and the prefix store keep their data (~/.local/state/keepgate)",
    )
    parser.add_argument("--config", metavar="FILE", help="settings in YAML (none); read again when it changes")
    parser.add_argument(
        "--drain-seconds",
        metavar="SECONDS",
        dest="timeouts.shutdown",
        help="how long requests under way may take after a stop signal (10)",
    )
    parser.add_argument(
        "--log-level", metavar="{debug,info,warning,error}", help="the least severe messages that are logged (info)"
    )
    engine = parser.add_argument_group("the in-repo backend, which runs where no --upstream is given")
    engine.add_argument(
        "--model", metavar="PATH_OR_ID", help="a folder, a .gguf file or a hub id (SmolLM2-135M-Instruct)"
    )
    engine.add_argument(
        "--replicas",
        metavar="N",
        dest="backend.replicas",
        help="backends side by side; prompts go to the one that has computed their beginning (1)",
    )
    engine.add_argument(
        "--quantization",
        metavar="{none,auto,int8,int4,fp8,nf4,gptq-int4,awq-int4,mixed}",
        dest="backend.quantization",
        help="of weights (none)",
    )
    engine.add_argument(
        "--kv-memory",
        metavar="SIZE",
        dest="backend.kv_memory",
        help="for keys and values, such as 4GiB (512MiB on a CPU)",
    )
    engine.add_argument(
        "--max-batch",
        metavar="N",
        dest="backend.max_batch",
        help="answers that are computed at the same time (32 on a CPU)",
    )
    engine.add_argument(
        "--prefix-memory",
        metavar="SIZE",
        dest="backend.prefix_memory",
        help="host memory for keys and values of prompts that may come again, such as 2GiB (none)",
    )
    engine.add_argument(
        "--prefix-disk-size",
        metavar="SIZE",
        dest="backend.prefix_disk_size",
        help="disk space for them in the state folder, which outlive the backend there; 0 for none (4GiB)",
    )


def _refuse(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    if not word.startswith("-"):
        parser.error(f"{word!r} is not expected here; options begin with --")
    option = word.partition("=")[0]
    options = [string for action in parser._actions for string in action.option_strings]
    parser.error(f"{option} is not an option" + _suggestion(option, options))


def _suggestion(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


_NOT_SETTINGS = ("command", "config", "json", "paid_requests")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where settings come from: `file`, the environment and the command line."""

    file: Path | None
    read: "Callable[[], tuple[Settings, list[str]]]"
    """The settings and warnings; raises SettingsError."""


def _settings_source(parsed: argparse.Namespace) -> _Source:
    from gateway.routing.models import check_models
    from gateway.settings.refusals import PREFIX
    from gateway.settings.sources import load
    from gateway.upstreams.identity import check_api_keys

    given = {name: value for name, value in vars(parsed).items() if name not in _NOT_SETTINGS}
    file = parsed.config or os.environ.get(PREFIX + "CONFIG")
    environment = {name: value for name, value in os.environ.items() if name != PREFIX + "CONFIG"}
    path = Path(file) if file else None

    def check(settings: "Settings") -> None:
        check_models(settings.routing, settings.servers)
        check_api_keys(settings.servers)

    return _Source(path, lambda: load(path, environment, given, check))


def _doctor(parsed: argparse.Namespace) -> int:
    from gateway.commands.doctor.command import run as run_doctor

    source = _settings_source(parsed)
    return run_doctor(source.read, as_json=parsed.json, paid_requests=parsed.paid_requests)


def _serve(parsed: argparse.Namespace) -> int:
    from gateway.settings.fields import SettingsError
    from gateway.settings.reloading import stamp_of
    from telemetry.logs import configure_logging

    source = _settings_source(parsed)
    seen = stamp_of(source.file)
    try:
        settings, warnings = source.read()
    except SettingsError as error:
        print(f"keepgate: {error}", file=sys.stderr)
        return 2
    configure_logging(settings.log.format, settings.log_level)
    for warning in warnings:
        print(f"keepgate: {warning}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        if settings.workers > 1:
            from gateway.processes.shared_metrics import share_metrics

            try:
                stack.enter_context(share_metrics(settings.state_path()))
            except OSError as error:
                print(
                    f"keepgate: state_dir: no place for the counters of {settings.workers} workers: {error}",
                    file=sys.stderr,
                )
                return 1
        from gateway.processes.serve import serve

        return serve(settings, lambda: source.read()[0], source.file, seen)


def _run_backend(command: str, words: list[str]) -> int:
    """Become the backend: the gateway reaches it over HTTP only, and imports nothing of it."""
    if importlib.util.find_spec("torch") is None:
        print(f"keepgate {command}: not installed; install the extra: pip install 'keepgate[backend]'", file=sys.stderr)
        return 1
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", _BACKEND_MODULES[command], *words])  # noqa: S606  # no shell is wanted
    return 1


def _run_evaluation(words: list[str]) -> int:
    """Become the evaluation of pairs: its libraries take seconds to load, and no other command needs them."""
    if any(importlib.util.find_spec(package) is None for package in ("numpy", "tokenizers", "sentence_transformers")):
        print(
            "keepgate eval-pairs: not installed; install the extra: pip install 'keepgate[semantic]'", file=sys.stderr
        )
        return 1
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "cache.semantic.evaluation", *words])  # noqa: S606  # as above
    return 1


def _run_replay(words: list[str]) -> int:
    """Become the replay: it is the prefix store's, of which the gateway imports nothing."""
    if importlib.util.find_spec("numpy") is None:
        print("keepgate replay: not installed; install the extra: pip install 'keepgate[backend]'", file=sys.stderr)
        return 1
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "prefix_store.replay", *words])  # noqa: S606  # as above
    return 1
