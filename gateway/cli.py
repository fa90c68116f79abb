"""The command `keepgate`."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway import __version__

_DESCRIPTION = """\
A caching gateway in front of LLM backends. Point a chat app's base URL at it:
every answer is computed at most once."""

_EXAMPLES = """\
examples:
  keepgate serve                                   the small in-repo model, nothing else needed
  keepgate serve --upstream http://gpu:8000/v1     in front of any OpenAI-compatible server
  keepgate serve --upstream mock:                  a scripted upstream, to try an app without a model
  keepgate backend --model ./Llama-3.2-1B          the decode engine alone

Every setting may also stand in a YAML file (--config) or in the environment (KEEPGATE_PORT, KEEPGATE_CACHE_TTL)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["backend"]:
        return _run_backend(words[1:])
    parsed = _parser().parse_args(words)
    if parsed.command is None:
        _parser().print_help()
        return 2
    return _serve(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keepgate",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"keepgate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    serve = commands.add_parser(
        "serve",
        help="run the gateway",
        description="Run the gateway until Ctrl-C.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "--upstream",
        action="append",
        dest="upstreams",
        metavar="URL",
        help="an OpenAI-compatible server; may be given again. Without one the in-repo backend is started",
    )
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", help="port to listen on (8080)")
    serve.add_argument("--workers", metavar="N", help="processes that share the port (1)")
    serve.add_argument("--redis", metavar="URL", help="a Redis URL, `embedded` (default) or `none`")
    serve.add_argument("--model", metavar="PATH_OR_ID", help="what the in-repo backend serves (a small chat model)")
    serve.add_argument("--config", metavar="FILE", help="settings in YAML")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="how much to log (info)")
    commands.add_parser("backend", help="run the decode engine alone; see `keepgate backend --help`", add_help=False)
    return parser


def _serve(parsed: argparse.Namespace) -> int:
    from gateway.settings import PREFIX, SettingsError, load

    said = {name: value for name, value in vars(parsed).items() if name not in ("command", "config")}
    file = parsed.config or os.environ.get(PREFIX + "CONFIG")
    environment = {name: value for name, value in os.environ.items() if name != PREFIX + "CONFIG"}
    try:
        settings, warnings = load(Path(file) if file else None, environment, said)
    except SettingsError as error:
        print(f"keepgate: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    for warning in warnings:
        print(f"keepgate: {warning}", file=sys.stderr)
    if settings.workers > 1:
        from gateway.shared_metrics import share_metrics

        share_metrics()
    from gateway.serve import serve

    return serve(settings)


def _run_backend(words: list[str]) -> int:
    """Become the backend: the gateway reaches it over HTTP only, and imports nothing of it."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "backend", *words])  # noqa: S606  # no shell is wanted
    return 1
