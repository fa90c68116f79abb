"""Command line of the backend. Light at import: torch and aiohttp are loaded only when it runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn, get_args

from backend.commands.argument_types import context, memory_size, milliseconds, port, positive, seconds, threads
from backend.commands.prefix_options import add_prefix_arguments, by_option, read_prefix_arguments
from backend.errors import OUT_OF_MEMORY, ModelError, PrefixStoreError, is_out_of_memory
from backend.quantized_weights.names import Quantization
from backend.runners.fused.thread_count import limit_spinning


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the backend's options to a parser."""
    parser.add_argument(
        "--model",
        default="default",
        metavar="PATH_OR_ID",
        help="'default' (the bundled SmolLM2-135M-Instruct), a directory with config.json and safetensors, "
        "a .gguf file, or a hub id (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, metavar="N", default=8081, help="port, 0 for any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory for keys and values, such as 4GiB; it bounds what runs at the same time (default: 512MiB on a "
        "CPU, most of what the weights leave free on a CUDA device)",
    )
    parser.add_argument(
        "--max-batch",
        type=positive,
        metavar="N",
        help="sequences that run at the same time (default: 32 on a CPU, 256 on a CUDA device)",
    )
    parser.add_argument(
        "--max-context",
        type=context,
        metavar="N",
        help="longest prompt plus answer in tokens (default: the model's)",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="what computes; auto is a CUDA device that can, else the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="what to compute in; auto is float16 weights where the fused step serves, else float32 "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default="none",
        help="keep the weights in fewer bits, which makes decoding faster and answers a little different; "
        "docs/benchmarks/ says by how much. int8, int4, fp8 and nf4 round to the nearest; gptq-int4, awq-int4 and "
        "mixed are made once, which takes minutes, and kept; auto measures what is fastest here and loses next to "
        "nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=["auto", "int8", "fp8"],
        default="auto",
        help="how keys and values are stored: as they are computed, or in one byte with a scale for each token and "
        "head (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=threads,
        metavar="N",
        help="threads that compute (default: the cores this process may use)",
    )
    parser.add_argument(
        "--step-tokens",
        type=positive,
        metavar="N",
        help="tokens computed in one step at most; more is faster for long prompts and makes running answers wait "
        "longer for each token (default: 128 on a CPU, 2048 on a CUDA device)",
    )
    parser.add_argument(
        "--max-waiting",
        type=positive,
        metavar="N",
        default=256,
        help="answers that may wait beyond --max-batch before requests get 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=seconds,
        metavar="SECONDS",
        help="what a request may take, waiting included, before it ends with 504 (default: no limit)",
    )
    parser.add_argument(
        "--batching",
        choices=["continuous", "dynamic", "static"],
        default="continuous",
        help="when requests join: at any step, or in batches that begin when they are full or have waited "
        "--max-wait-ms (dynamic) or when the last one has ended (static) (default: %(default)s)",
    )
    parser.add_argument(
        "--max-wait-ms",
        type=milliseconds,
        metavar="MS",
        default=50.0,
        help="how long a dynamic batch waits to be full (default: %(default)s)",
    )
    parser.add_argument(
        "--scheduling-policy",
        choices=["fcfs", "priority"],
        default="priority",
        help="who goes first: whose request has the smaller 'priority', then who came first; or who came first and "
        "nothing else (fcfs), where a request with a priority is refused (default: %(default)s)",
    )
    parser.add_argument(
        "--prefix-sharing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether a prompt that begins like another one is computed from where they part (default: it is)",
    )
    add_prefix_arguments(parser)
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja template of conversations, in the place of the model's own",
    )
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop when the process that started this one is gone"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT.

    When the model is warm and the port listens, prints one line of JSON to stdout:
    ``{"event": "ready", "url": ..., "model": ...}``. Progress goes to stderr.

    Returns:
        The exit status: 0 after a clean stop, 1 if the model or the address could not be had.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    started = time.monotonic()

    def progress(sentence: str) -> None:
        print(f"[backend {time.monotonic() - started:5.1f} s] {sentence}", file=sys.stderr, flush=True)

    outlive_readers()
    limit_spinning()
    from backend.commands.server_process import serve
    from backend.engine.config import Batching, BatchingMode, EngineConfig

    try:
        prefix_store = read_prefix_arguments(arguments)
    except ValueError as error:
        print(f"keepgate backend: {error}", file=sys.stderr)
        return 1
    engine = EngineConfig(
        kv_memory=arguments.kv_memory,
        max_batch=arguments.max_batch,
        max_context=arguments.max_context,
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_dtype=arguments.kv_dtype,
        step_tokens=arguments.step_tokens,
        max_waiting=arguments.max_waiting,
        max_seconds=arguments.max_seconds,
        batching=Batching(BatchingMode(arguments.batching), arguments.max_wait_ms / 1000),
        scheduling_policy=arguments.scheduling_policy,
        shares_prefixes=arguments.prefix_sharing,
        threads=arguments.threads or len(os.sched_getaffinity(0)),
        prefix_store=prefix_store,
        public_prefixes=tuple(arguments.public_prefix),
    )

    def announce(url: str, model: str) -> None:
        print(json.dumps({"event": "ready", "url": url, "model": model}), flush=True)

    try:
        serve(
            arguments.model,
            engine,
            chat_template=_chat_template(arguments.chat_template),
            host=arguments.host,
            port=arguments.port,
            exit_with_parent=arguments.exit_with_parent,
            progress=progress,
            announce=announce,
        )
    except PrefixStoreError as error:
        print(f"keepgate backend: {by_option(str(error))}", file=sys.stderr)
        return 1
    except (ModelError, OSError) as error:
        print(f"keepgate backend: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"keepgate backend: {OUT_OF_MEMORY}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server had taken over the signal
        return 130
    return 0


def main() -> int:
    """Parses ``sys.argv`` and runs."""
    end_with_the_reader()
    parser = Parser(prog="keepgate backend", description="The decode engine, served on its own.", allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args())


def end_with_the_reader() -> None:
    """Lets the process end quietly when nobody reads its output any more (``| head -1``), as other commands do."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def outlive_readers() -> None:
    """Lets the process live on when a pipe or a socket is closed on it, which Python does from the start."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _chat_template(file: Path | None) -> str | None:
    if file is None:
        return None
    from backend.chat.chat_template import read_template

    try:
        return read_template(file)
    except ModelError as error:
        raise ModelError(f"--chat-template: {error}") from error
