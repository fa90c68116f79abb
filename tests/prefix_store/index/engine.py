"""A process that holds blocks and reads those of others, at random: `python -m tests.prefix_store.index.engine`.

After some operations it prints a line, and continues until it reads a line. Then it prints the blocks it holds as one
line of JSON, and waits for the next line.
"""

import asyncio
import itertools
import json
import random
import sys

from prefix_store.index.index import RedisIndex, open_index
from prefix_store.index.local_owner import LocalOwner
from prefix_store.index.owner import TierKind
from tests.prefix_store.index.blocks import PATIENT, Shelf, chain

LIFETIME = 1.0
CHAINS = 6
BLOCKS = 40
A_WHILE = 30
PACE = 0.003  # several of them share a machine with the test


def chains(namespace: bytes) -> list[list[bytes]]:
    """The chains that all engines use."""
    return [chain(namespace, BLOCKS, seed) for seed in range(CHAINS)]


async def main(url: str, namespace: bytes, name: str, seed: int) -> None:
    """Holds, withdraws and reads blocks until it is stopped."""
    chance = random.Random(seed)  # noqa: S311 (a test's)
    shelf = Shelf()
    options = {"deadline": PATIENT, "heartbeat": 0.1, "lifetime": LIFETIME}
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    stop = asyncio.create_task(lines.readline())
    async with open_index(url, namespace, **options) as index:  # type: ignore[arg-type]
        owner = index.own(name, TierKind.MEMORY, shelf.inventory)
        await index.next_heartbeat()
        for number in itertools.count():
            if number == A_WHILE:
                print("working", flush=True)
            if number > A_WHILE and stop.done():
                break
            keys = chance.choice(chains(namespace))
            if chance.random() < 0.4:
                await read(index, keys)
            else:
                write(owner, shelf, keys, chance)
            await asyncio.sleep(PACE)
        await index.flush()
        print(json.dumps([key.hex() for key in shelf.keys]), flush=True)
        await lines.readline()


def write(owner: LocalOwner, shelf: Shelf, keys: list[bytes], chance: random.Random) -> None:
    """Publishes some blocks of a chain, or withdraws its tail; never leaves a hole."""
    held = sum(key in shelf.keys for key in keys)
    if chance.random() < 0.5:
        new = keys[held : held + chance.randint(1, 20)]
        shelf.keys += new
        owner.publish(new)
        owner.touch(keys[:held])
    else:
        tail = keys[held - min(held, chance.randint(1, 20)) : held][::-1]
        shelf.keys[:] = [key for key in shelf.keys if key not in tail]
        owner.forget(tail)


async def read(index: RedisIndex, keys: list[bytes]) -> None:
    """Finds a prefix, and extends the claims of its holders."""
    match = await index.match(keys)
    for holder in match.runs[0].holders if match.runs else ():
        index.refresh_claims(holder.owner, keys[: match.runs[0].blocks])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
