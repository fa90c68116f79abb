"""What ranks exchange by shared memory: sums, and rows side by side."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest
import torch

from backend.runners.parallel import shared_memory
from backend.runners.parallel.shared_exchange import SharedExchange, Unanswered, size_of

DEADLINE = 60.0
SHAPES = ((1,), (3, 5), (600, 700), (1, 1), (2, 300_001), (0, 4))
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 20


def addend(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank adds in a round."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(97 * number + rank)).to(dtype)


def in_order(ranks: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The sum as it is defined."""
    total = addend(0, number, shape, dtype)
    for rank in range(1, ranks):
        total = total + addend(rank, number, shape, dtype)
    return total


def take_part(descriptor: int, rank: int, ranks: int) -> None:
    """The process of a rank: it ends with status 1 at the first sum that is another one, to the bit, and with status 2
    at other rows.
    """
    torch.set_num_threads(1)
    exchange = SharedExchange(shared_memory.attach(descriptor), rank, ranks, DEADLINE)
    for number in range(ROUNDS):
        for shape in SHAPES:
            for dtype in DTYPES:
                tensor = addend(rank, number, shape, dtype)
                if (number + rank) % 7 == 0:
                    time.sleep(0.003)  # late
                exchange.add(tensor)
                if not torch.equal(tensor, in_order(ranks, number, shape, dtype)):
                    os._exit(1)
        # As many operations in all, some of them in several pieces: what comes next finds its slots free.
        widths = [300_000 * (number % 2) + 5 + other for other in range(ranks)]
        for rows in (0, 1, 3):
            parts = [addend(other, number, (rows, width), torch.float32) for other, width in enumerate(widths)]
            whole = exchange.gather(parts[rank], widths)
            if (whole is None) != (rank > 0) or (whole is not None and not torch.equal(whole, torch.cat(parts, 1))):
                os._exit(2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_the_same_bits_in_all_ranks(ranks: int) -> None:
    """Of small and large tensors, of more than a slot holds and of none, whoever is late; and rank 0 gets the rows of
    all.
    """
    descriptor = shared_memory.create(size_of(ranks))
    context = multiprocessing.get_context("spawn")
    with os.fdopen(descriptor, "rb+") as memory:
        os.set_inheritable(memory.fileno(), True)
        processes = [
            context.Process(target=_take_part, args=(os.getpid(), memory.fileno(), rank, ranks))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE)
            assert process.exitcode == 0


def _take_part(parent: int, descriptor: int, rank: int, ranks: int) -> None:
    # Spawned processes inherit no descriptor but can open the parent's.
    with open(f"/proc/{parent}/fd/{descriptor}", "rb+") as memory:
        take_part(memory.fileno(), rank, ranks)


def test_a_rank_that_never_arrives_is_an_error() -> None:
    """After the deadline, whatever the others do."""
    exchange = SharedExchange(torch.zeros(size_of(2), dtype=torch.uint8), 0, 2, deadline=0.05)
    with pytest.raises(Unanswered, match=r"not arrived at an operation within 0\.05 s"):
        exchange.add(torch.ones(3))


def test_a_wait_can_be_given_up() -> None:
    """By another thread, which knows that a rank is lost."""
    exchange = SharedExchange(torch.zeros(size_of(2), dtype=torch.uint8), 1, 2, DEADLINE)
    caught: list[Unanswered] = []

    def wait() -> None:
        try:
            exchange.add(torch.ones(3))
        except Unanswered as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    exchange.abort()
    waiting.join(DEADLINE)
    assert [str(error) for error in caught] == ["an operation was given up"]
