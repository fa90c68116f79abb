"""``keepgate backend`` and ``python -m backend``: serves one model. torch and aiohttp are imported when it runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from backend.commands.argument_types import context, memory_size, milliseconds, port, positive, seconds, threads
from backend.commands.command_line import (
    Parser,
    exit_on_broken_pipe,
    ignore_broken_pipe,
    progress_printer,
    run_command,
)
from backend.commands.prefix_options import add_prefix_arguments, name_option, read_prefix_arguments
from backend.errors import ModelError, PrefixStoreError
from backend.quantized_weights.names import Quantization
from backend.runners.fused.thread_count import limit_spinning
from telemetry.logs import configure_logging
from telemetry.tracing.span import TracingUnavailable

if TYPE_CHECKING:
    from backend.engine.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the backend's options to a parser."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, metavar="N", default=8081, help="port, 0 for any free one (default: %(default)s)"
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        metavar="N",
        default=1,
        help="processes on this host that divide each layer, each on a CUDA device of its own or all with torch on the "
        "CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--pipeline-parallel",
        type=positive,
        metavar="N",
        default=1,
        help="stages of layers, each with a process of its own, or with as many as --tensor-parallel says "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=seconds,
        metavar="SECONDS",
        help="limit of a request's time, including waiting; then it ends with 504 (default: no limit)",
    )
    parser.add_argument(
        "--log-format",
        choices=["human", "json"],
        default="human",
        help="lines for people, or a JSON object for each (default: %(default)s)",
    )
    traces = parser.add_mutually_exclusive_group()
    traces.add_argument(
        "--traces-endpoint",
        metavar="URL",
        default=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        help="base URL of a collector of traces, such as http://127.0.0.1:4318 (default: the variable "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else no traces)",
    )
    traces.add_argument(
        "--traces-file", type=Path, metavar="FILE", help="append traces to a file, a JSON object of OTLP in each line"
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the parent process ends")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those that say what is computed, and how: `keepgate profile` has them too."""
    parser.add_argument(
        "--model",
        default="default",
        metavar="PATH_OR_ID",
        help="'default' (the bundled SmolLM2-135M-Instruct), a directory with config.json and safetensors, "
        "a .gguf file, or a hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory for keys and values, such as 4GiB, which limits the sequences that run at the same time (default: "
        "512MiB on a CPU, most of what the weights leave free on a CUDA device)",
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
        help="where to compute; auto is a CUDA device if there is one, else the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="precision; auto is float16 weights where the fused step supports the model (bfloat16 for those released "
        "in it, where the processor multiplies it), else float32 (default: %(default)s)",
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default="none",
        help="store the weights in fewer bits, which makes decoding faster and changes answers a little "
        "(see docs/benchmarks/). int8, int4, fp8 and nf4 round to the nearest; gptq-int4, awq-int4 and "
        "mixed are computed once, which takes minutes, and stored; auto measures what is fastest here and loses next "
        "to nothing (default: %(default)s)",
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
        help="limit of tokens computed in one step; more is faster for long prompts and slower for each token of "
        "running answers (default: 128 on a CPU, 2048 on a CUDA device)",
    )
    parser.add_argument(
        "--max-waiting",
        type=positive,
        metavar="N",
        default=256,
        help="answers that may wait beyond --max-batch; further requests get 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--batching",
        choices=["continuous", "dynamic", "static"],
        default="continuous",
        help="when requests join: at any step (continuous), in batches that start when full or after --max-wait-ms "
        "(dynamic), or in batches that start when the previous one has ended (static) (default: %(default)s)",
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
        help="order of waiting requests: by the field 'priority' (smaller first), then by arrival; or by arrival alone "
        "(fcfs), which refuses requests with a priority (default: %(default)s)",
    )
    parser.add_argument(
        "--prefix-sharing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the keys and values of prompts that begin alike (default: yes)",
    )
    parser.add_argument(
        "--speculation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify several tokens of an answer in one step where that is faster: text that the prompt has, or that "
        "the request predicts; answers do not change (default: yes)",
    )
    parser.add_argument(
        "--draft-model",
        default="",
        metavar="PATH_OR_ID",
        help="a smaller model with the same vocabulary that writes what is verified where nothing is found (default: "
        "none)",
    )
    parser.add_argument(
        "--medusa",
        type=Path,
        metavar="DIR",
        help="heads from `keepgate train-medusa` that propose what is verified where nothing is found (default: none)",
    )
    add_prefix_arguments(parser)
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja chat template that replaces the model's own",
    )
    parser.add_argument(
        "--strict-fields",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="refuse a request with a field that is in no API; else it is ignored, and x-keepgate-ignored-fields in "
        "the response names it (default: no)",
    )
    parser.add_argument(
        "--drop-images",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="leave images and other parts that are not text out of messages; else they are refused (default: no)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT.

    When the model is warm and the port listens, prints one line of JSON to stdout:
    ``{"event": "ready", "url": ..., "model": ...}``. Progress goes to stderr.

    Returns:
        The exit status: 0 after a clean stop, 1 if the model or the address cannot be used.
    """
    return run_command("keepgate backend", lambda: _serve(arguments))


def main() -> int:
    """Parses ``sys.argv`` and runs."""
    exit_on_broken_pipe()
    parser = Parser(prog="keepgate backend", description="The decode engine, served on its own.", allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args())


def _serve(arguments: argparse.Namespace) -> None:
    configure_logging(arguments.log_format, "warning")
    progress = progress_printer("backend")
    if arguments.log_format == "json":
        logger = logging.getLogger("backend")
        logger.setLevel(logging.INFO)
        progress = logger.info
    ignore_broken_pipe()
    limit_spinning()
    from backend.commands.server_process import serve

    engine = replace(
        engine_config(arguments),
        max_seconds=arguments.max_seconds,
        tensor_parallel=arguments.tensor_parallel,
        pipeline_parallel=arguments.pipeline_parallel,
    )

    def announce(url: str, model: str) -> None:
        print(json.dumps({"event": "ready", "url": url, "model": model}), flush=True)

    try:
        serve(
            arguments.model,
            engine,
            chat_template=template_of(arguments),
            host=arguments.host,
            port=arguments.port,
            exit_with_parent=arguments.exit_with_parent,
            progress=progress,
            announce=announce,
            traces_endpoint="" if arguments.traces_file else arguments.traces_endpoint,
            traces_file=str(arguments.traces_file or ""),
        )
    except PrefixStoreError as error:
        raise ModelError(name_option(str(error))) from error
    except TracingUnavailable as error:
        raise ModelError(f"--traces-file, --traces-endpoint: {error}") from error


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """What the options of `add_engine_arguments` say. Raises ModelError: some of them are not right together."""
    from backend.engine.config import Batching, BatchingMode, EngineConfig

    try:
        prefix_store = read_prefix_arguments(arguments)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return EngineConfig(
        kv_memory=arguments.kv_memory,
        max_batch=arguments.max_batch,
        max_context=arguments.max_context,
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_dtype=arguments.kv_dtype,
        step_tokens=arguments.step_tokens,
        max_waiting=arguments.max_waiting,
        batching=Batching(BatchingMode(arguments.batching), arguments.max_wait_ms / 1000),
        scheduling_policy=arguments.scheduling_policy,
        shares_prefixes=arguments.prefix_sharing,
        threads=arguments.threads or len(os.sched_getaffinity(0)),
        speculation=arguments.speculation,
        draft_model=arguments.draft_model,
        medusa=arguments.medusa,
        prefix_store=prefix_store,
        public_prefixes=tuple(arguments.public_prefix),
        strict_fields=arguments.strict_fields,
        drop_images=arguments.drop_images,
    )


def template_of(arguments: argparse.Namespace) -> str | None:
    """Source of the chat template that replaces the model's own; None: there is none. Raises ModelError."""
    if arguments.chat_template is None:
        return None
    from backend.chat.chat_template import read_template

    try:
        return read_template(arguments.chat_template)
    except ModelError as error:
        raise ModelError(f"--chat-template: {error}") from error
