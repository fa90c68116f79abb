"""Whether two vLLMs with one store ever answer wrongly, while both are killed and what they share is damaged."""

import os
import sys
import time

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure
from benchmarks.vllm.servers import check_installed
from tests.prefix_store.connectors.vllm_server.soak import soaked

_OPERATIONS, _QUICK_OPERATIONS = 10_000, 300
_SEED = 0
_METHOD = """\
Random operations (seed 0) with a small random model in float32: requests one by one and up to eight at once, with and
without a salt, requests that are taken back, blocks on disk that are cut, changed in a bit or removed, a Valkey that
stands still, and servers that are killed and started again. One of the two computes in its scheduler's process, with
vLLM's own prefix cache, the other one in a process beside it, without. They share a folder and an index, are peers, and
have room for a few prompts only. Every answer is compared with that of a vLLM without a connector and without a prefix
cache, token by token; one that does not come within a minute counts as well."""


async def measure(quick: bool) -> Figure:
    check_installed()
    # The harness keeps to one core, and what it starts would too.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    began = time.monotonic()
    soak = await soaked(_QUICK_OPERATIONS if quick else _OPERATIONS, _SEED)
    if soak.missing and not quick:
        raise CannotMeasure(f"these did not occur: {', '.join(soak.missing)}")
    for each in soak.wrong[:20]:
        print(f"  {each}", file=sys.stderr)
    beside = {name: float(count) for name, count in soak.counts.items()} | {"seconds": time.monotonic() - began}
    rows = (
        Row(what="requests", unit="", rounds=(float(soak.counts["requests"]),), beside=(beside,)),
        Row(what="wrong or hung", unit="", rounds=(float(len(soak.wrong)),), target=Target("most", 0.0)),
    )
    return Figure(figure="vllm_soak", title="Two vLLMs, one store, and faults", method=_METHOD, rows=rows)
