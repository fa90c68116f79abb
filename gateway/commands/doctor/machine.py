"""The processor, the memory and the open files that a gateway may use here."""

import os
import platform
import resource
from pathlib import Path

from gateway.commands.doctor.finding import Finding, in_units, ok, problem, warning
from gateway.http.memory_guard import memory_limit
from gateway.settings.settings import Settings

# A worker without its cache, and what semantic.capacity says of an entry, in bytes.
_WORKER_BYTES = 80 * 2**20
_SEMANTIC_BYTES = 300 * 2**20
_SEMANTIC_ENTRY_BYTES = 2_000
_ENGINE_KV_BYTES = 512 * 2**20
_FEATURES = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512bw": "AVX-512BW",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "asimddp": "dot products",
    "bf16": "BF16",
    "sve": "SVE",
}
# The oldest processors for which kernels are written; on others torch computes.
_X86_KERNELS = {"avx2", "fma", "f16c"}
_ARM_KERNELS = {"asimd"}
# A streamed answer holds a connection of the client and one to the upstream.
_FILES_OF_REQUEST = 2
_SPARE_FILES = 200
_FEW_FILES = 4096


async def check_processor(settings: Settings) -> list[Finding]:
    """Cores against workers, and the instructions that the kernels know."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    model, flags = _cpuinfo(Path("/proc/cpuinfo"))
    features = [name for flag, name in _FEATURES.items() if flag in flags] or ["no AVX2, no NEON"]
    said = f"{model or platform.machine()}, {cores} core{'s' if cores > 1 else ''}: {', '.join(features)}"
    found = [ok("processor", said)]
    if missing := missing_kernels(settings, flags):
        found = [
            warning(
                "processor",
                f"{said}: {' and '.join(missing)}",
                "expect torch to compute, slower; in a virtual machine let the host's processor"
                " through (QEMU: -cpu host)",
            )
        ]
    if settings.workers > cores:
        found.append(
            warning(
                "processor",
                f"workers: {settings.workers} processes share {cores} core{'s' if cores > 1 else ''}",
                f"set workers to {cores} at most: more of them only add memory and context switches",
            )
        )
    return found


def missing_kernels(settings: Settings, flags: set[str]) -> list[str]:
    """What has kernels that a processor with these flags of /proc/cpuinfo cannot run, and what they need."""
    missing = []
    if not settings.upstreams and not (flags >= _X86_KERNELS or flags >= _ARM_KERNELS):
        missing.append("the engine's kernels need AVX2, FMA and F16C, or NEON")
    if settings.semantic.mode != "off" and not flags >= _X86_KERNELS:
        missing.append("the semantic cache's kernels need AVX2, FMA and F16C")
    return missing


async def check_memory(settings: Settings) -> list[Finding]:
    """What the settings allow to be used, against what the machine or the container has."""
    parts = _memory_parts(settings)
    asked = sum(parts.values())
    # Nine tenths, which is what the gateway allows itself.
    there = memory_limit(0)
    available = _available(Path("/proc/meminfo"))
    split = ", ".join(f"{name} {in_units(size)}" for name, size in parts.items())
    weights = "" if settings.upstreams else ", and the weights of the model beside that"
    said = f"the settings allow {in_units(asked)} ({split}){weights}"
    limit = settings.limits.memory
    least = in_units(settings.cache.memory + 2 * _WORKER_BYTES)
    if 0 < limit <= settings.cache.memory:
        return [
            problem(
                "memory",
                f"limits.memory ({in_units(limit)}) is not more than cache.memory ({in_units(settings.cache.memory)}):"
                " with a full cache every new request would be refused",
                f"set limits.memory to {least} or more, or cache.memory lower",
            )
        ]
    if asked > there:
        return [
            warning(
                "memory",
                f"{said}; nine tenths of this machine or container are {in_units(there)}",
                "lower cache.memory, cache.embedded_memory, backend.kv_memory or workers, or give it more memory",
            )
        ]
    if available is not None and asked > available:
        return [
            warning(
                "memory",
                f"{said}; {in_units(available)} are available now",
                "other programs use the memory: stop some, or lower cache.memory and cache.embedded_memory",
            )
        ]
    return [ok("memory", f"{said}; the gateway uses up to {in_units(there)}")]


async def check_open_files(settings: Settings) -> list[Finding]:
    """The limit of open files of a process, against the connections it may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return [ok("open files", "no limit")]
    requests = max(0, soft - _SPARE_FILES) // _FILES_OF_REQUEST
    connections = settings.limits.max_connections
    more = "raise it: `ulimit -n 65536` in the shell, LimitNOFILE=65536 in the systemd unit"
    if connections is not None and requests < connections:
        return [
            warning(
                "open files",
                f"{soft} a process are enough for {requests} streams, and limits.max_connections is {connections}",
                more,
            )
        ]
    if soft < _FEW_FILES:
        return [warning("open files", f"{soft} a process are enough for some {requests} streams at once", more)]
    return [ok("open files", f"{soft} a process, enough for some {requests} streams at once (at most {hard})")]


def _memory_parts(settings: Settings) -> dict[str, int]:
    """Bytes by what takes them."""
    workers = settings.workers
    parts = {f"{workers} worker{'s' if workers > 1 else ''}": workers * (settings.cache.memory + _WORKER_BYTES)}
    if settings.redis == "embedded":
        parts["embedded Valkey"] = settings.cache.embedded_memory
    if settings.semantic.mode != "off":
        parts["semantic cache"] = _SEMANTIC_BYTES + settings.semantic.capacity * _SEMANTIC_ENTRY_BYTES
    if not settings.upstreams and settings.backend.device != "cuda":
        parts["KV blocks"] = settings.backend.kv_memory or _ENGINE_KV_BYTES
    if not settings.upstreams and settings.backend.prefix_memory:
        parts["prefix store"] = settings.backend.prefix_memory
    return parts


def _cpuinfo(file: Path) -> tuple[str, set[str]]:
    """The name of the processor and its flags; "" and none where they are not told."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return "", set()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("model name", ""), set((fields.get("flags") or fields.get("Features") or "").split())


def _available(file: Path) -> int | None:
    """Bytes that programs can get without swapping; None where it is not told (proc(5))."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
