"""Servers of vLLM as the benchmarks start them."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.processes import CannotMeasure
from tests.prefix_store.connectors.vllm_server.models import random_llama, smollm2
from tests.prefix_store.connectors.vllm_server.server import VllmServer, vllm_server

BF16 = ("--dtype", "bfloat16", "--no-enable-prefix-caching")


def models(scratch: Path, quick: bool) -> dict[str, Path]:
    """The models of the figures, by what they are called: the small one and a random one, which is written."""
    found = {"SmolLM2-135M": smollm2()}
    if not quick:
        folder = scratch / "model"
        found["a random model of 200M"] = random_llama(folder, layers=16, hidden=1024, heads=16, kv_heads=8)
    return found


def check_installed() -> None:
    """Raises CannotMeasure without an environment that has vLLM."""
    if "TEST_VLLM" not in os.environ:
        raise CannotMeasure("TEST_VLLM names no environment with vLLM; expected build/vllm, which make test-vllm makes")


def wait_for_cores() -> None:
    """To be called between servers: the processes of vLLM's executor spin for a second after their last message."""
    time.sleep(1.2)


@contextmanager
def served(
    model: Path, options: Mapping[str, object] | None, connector: str = "KeepgateConnector", *arguments: str
) -> Iterator[VllmServer]:
    """A server on all cores; `options` as for `vllm_server`."""
    # The harness keeps to one core, and what it starts would too.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    # Without PASSIVE a thread spins at each barrier; where the one it waits for has its core, until it is moved: after
    # another server has computed, the next prompt of 1,550 tokens took 1 s more.
    threads = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "OMP_WAIT_POLICY": "PASSIVE"}
    with vllm_server(model, options, *BF16, *arguments, connector=connector, environment=threads) as server:
        yield server
