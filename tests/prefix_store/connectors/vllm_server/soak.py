"""Random requests to two vLLM servers with one store, with faults, for `benchmarks.vllm.soak` and its own command:
`python -m …vllm_server.soak OPERATIONS [SEED]`.

Both have the connector, a folder on disk together, and an index in Valkey by which they are peers; one computes in a
process of its own, as with several ranks, the other in that of its scheduler, as on one GPU. Operations are
requests one at a time and several at once, requests that are taken back, damaged, cut and removed frames, a Valkey that
is stopped and goes on, and kills of a server, which is started again. Every answer must be that of a vLLM without a
connector, and come within a minute. The status is 1 otherwise, and where no fault was made or nothing was restored.
"""

import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.prefix.index import valkey_running
from tests.compose.monitoring import free_port
from tests.prefix_store.connectors.vllm_server.models import random_llama
from tests.prefix_store.connectors.vllm_server.server import VllmServer, vllm_server

_BLOCK = 32
_ANSWER = 6
_BASES, _LONGEST = 24, 600
_WEIGHTS = {"ask": 820, "ask several": 90, "take back": 60, "damage": 20, "stop Valkey": 8, "kill": 1}
_LONGEST_STOP = 1.5
_PLACES = ("memory", "disk", "peers")
_POOL = ("--num-gpu-blocks-override", "96")
_NO_CACHE = ("--no-enable-prefix-caching",)
# A worker of its own spins for a second after each step: three of them leave each other little of a few processors.
_ONE_PROCESS = ("--distributed-executor-backend", "uni")
_ONE_PROCESS_VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Soak:
    """Two servers with the connector, and one without as the reference. `counts` are of operations, requests, damaged
    blocks and restored tokens; `wrong` says what answered otherwise than the reference, or not in time.
    """

    def __init__(self, folder: Path, url: str, valkey: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._folder = folder
        self._valkey = valkey
        self._pick = random.Random(seed)  # noqa: S311  # reproducible
        self._model = random_llama(folder / "model", layers=2, hidden=128, heads=2, kv_heads=2)
        common = {
            "disk": str(folder / "blocks"),
            "disk_size": "48MiB",
            "index": url,
            "secret_file": str(folder / "secret"),
            "audit": 20,
        }
        self._options = [
            {**common, "memory": "8MiB", "name": f"server-{place}", "address": f"http://127.0.0.1:{free_port()}"}
            for place in range(2)
        ]
        self._servers: list[tuple[VllmServer, ExitStack]] = []
        self._reference = ExitStack()
        self._plain: VllmServer | None = None
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._bases = [[self._pick.randrange(1_000, 40_000) for _ in range(_LONGEST)] for _ in range(_BASES)]

    def start(self) -> None:
        """All servers."""
        self._plain = self._reference.enter_context(
            vllm_server(self._model, None, *_POOL, *_NO_CACHE, *_ONE_PROCESS, environment=_ONE_PROCESS_VARIABLES)
        )
        for place in range(2):
            self._servers.append(self._started(place))

    def close(self) -> None:
        """Ends them."""
        for _, stack in self._servers:
            stack.close()
        self._reference.close()

    async def run(self, operations: int) -> None:
        """So many of them."""
        names, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        for number in range(operations):
            name = self._pick.choices(names, weights)[0]
            self.counts[name] += 1
            match name:
                case "ask":
                    await self._ask(self._server(), self._prompt())
                case "ask several":
                    server = self._server()
                    await asyncio.gather(
                        *(self._ask(server, self._prompt()) for _ in range(self._pick.randrange(2, 9)))
                    )
                case "take back":
                    await self._take_back(self._server())
                case "damage":
                    self._damage()
                case "stop Valkey":
                    await self._stop_valkey()
                case "kill":
                    await asyncio.to_thread(self._kill)
            if number % 500 == 499:
                print(f"{number + 1} operations: {dict(self.counts)}, {len(self.wrong)} wrong", flush=True)

    @property
    def missing(self) -> list[str]:
        """What has not happened, and should have."""
        places = (f"tokens restored from {place}" for place in _PLACES)
        return [name for name in (*_WEIGHTS, *places) if not self.counts[name]]

    def note_restored(self) -> None:
        """Counts what the servers have restored since they were started."""
        for place in _PLACES:
            self.counts[f"tokens restored from {place}"] += sum(int(each.restored(place)) for each, _ in self._servers)

    def _started(self, place: int) -> tuple[VllmServer, ExitStack]:
        stack = ExitStack()
        own = _ONE_PROCESS if place else _NO_CACHE
        started = vllm_server(self._model, self._options[place], *_POOL, *own, environment=_ONE_PROCESS_VARIABLES)
        return stack.enter_context(started), stack

    def _server(self) -> VllmServer:
        return self._pick.choice(self._servers)[0]

    def _prompt(self) -> list[int]:
        base = self._pick.randrange(_BASES)
        length = self._pick.choice((self._pick.randrange(1, _LONGEST), _BLOCK * self._pick.randrange(1, 19)))
        ending = self._pick.randrange(4)
        return [*self._bases[base][:length], *range(5_000 + ending, 5_000 + 3 * ending)]

    async def _ask(self, server: VllmServer, prompt: Sequence[int]) -> None:
        salt: dict[str, Any] = self._pick.choice(({}, {}, {"cache_salt": "tenant"}))
        self.counts["requests"] += 1
        key = tuple(prompt)
        if key not in self._known and self._plain is not None:
            self._known[key] = await asyncio.to_thread(self._plain.complete, prompt, _ANSWER)
        try:
            answer = await asyncio.to_thread(server.complete, prompt, _ANSWER, **salt)
        except (OSError, TimeoutError) as error:
            self.wrong.append(f"a prompt of {len(prompt)} tokens: {error!r}")
            return
        if answer != self._known[key]:
            self.wrong.append(f"a prompt of {len(prompt)} tokens: {answer}, expected {self._known[key]}")

    async def _take_back(self, server: VllmServer) -> None:
        await server.abandon({"model": "m", "prompt": self._prompt(), "max_tokens": 64}, self._pick.random() * 0.05)

    def _damage(self) -> None:
        """Changes, cuts or removes some frames."""
        frames = [path for path in (self._folder / "blocks" / "blocks").rglob("*") if path.is_file()]
        for path in self._pick.sample(frames, min(len(frames), 8)):
            how = self._pick.randrange(3)
            try:
                data = bytearray(path.read_bytes())
                if how == 0 or not data:
                    path.unlink()
                elif how == 1:
                    path.write_bytes(data[: self._pick.randrange(len(data))])
                else:
                    data[self._pick.randrange(len(data))] ^= 1 << self._pick.randrange(8)
                    path.write_bytes(data)
            except FileNotFoundError:  # it was evicted
                continue
            self.counts["damaged blocks"] += 1

    async def _stop_valkey(self) -> None:
        os.kill(self._valkey, signal.SIGSTOP)
        try:
            ends = time.monotonic() + self._pick.random() * _LONGEST_STOP
            while time.monotonic() < ends:
                await self._ask(self._server(), self._prompt())
        finally:
            os.kill(self._valkey, signal.SIGCONT)

    def _kill(self) -> None:
        place = self._pick.randrange(2)
        server, stack = self._servers[place]
        try:
            for name in _PLACES:
                self.counts[f"tokens restored from {name}"] += int(server.restored(name))
        except OSError as error:
            self.wrong.append(f"/metrics of a server: {error!r}")
        server.kill()
        stack.close()
        self._servers[place] = self._started(place)


async def soaked(operations: int, seed: int) -> Soak:
    """After so many operations."""
    folder = await asyncio.to_thread(lambda: Path(tempfile.mkdtemp(prefix="keepgate-vllm-")))
    try:
        async with valkey_running() as url:
            soak = Soak(folder, url, _process_of(url), seed)
            try:
                await asyncio.to_thread(soak.start)
                await soak.run(operations)
                await asyncio.to_thread(soak.note_restored)
            finally:
                await asyncio.to_thread(soak.close)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)
    return soak


async def _main(arguments: Sequence[str]) -> int:
    operations = int(arguments[0]) if arguments else 1_000
    soak = await soaked(operations, int(arguments[1]) if len(arguments) > 1 else 0)
    print(f"{operations} operations: {dict(soak.counts)}")
    print(f"{len(soak.wrong)} wrong or hung")
    for each in soak.wrong[:20]:
        print(each)
    if soak.missing:
        print(f"these did not occur: {', '.join(soak.missing)}; more operations are needed")
    return 1 if soak.wrong or soak.missing else 0


def _process_of(url: str) -> int:
    """The process of the Valkey at a URL."""
    import redis

    client: Any = redis.from_url(url)
    return int(client.info("server")["process_id"])


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1:])))
