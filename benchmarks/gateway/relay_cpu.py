"""CPU time of the gateway per chunk of a stream that it relays and records."""

import asyncio

from benchmarks.harness.client import Answer, Client
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, bare_relay, cores, gateway, upstream
from benchmarks.harness.request_bodies import chat

_STREAMS = 8
_METHOD = """\
Eight clients at once read long streamed answers, chunks of about 250 B, each of a question of its own, so that every
one is relayed and recorded. CPU time is that of the gateway's process, by its CPU clock, divided by chunks. "One by
one": each chunk leaves the upstream 2 ms after the one before, 4,000 a second in all, and is written to the client on
its own. "All at once": the upstream writes the whole stream, and many chunks arrive in one read. The reference is an
aiohttp handler that copies bytes from its client to its response and looks at nothing."""


async def measure(quick: bool) -> Figure:
    rounds, chunks = (2, 200) if quick else (5, 2_000)
    rows: list[Row] = []
    for what, pause in (("one by one", 0.002), ("all at once", 0.0)):
        async with (
            upstream(chunks=chunks, pause=pause) as origin,
            gateway(origin.url, on=cores().subject) as subject,
            bare_relay(origin.url) as reference,
        ):
            target = Target("most", 1.5) if pause else None
            rows += await _compare(subject, reference, what, chunks, rounds, target)
    return Figure(figure="relay_cpu", title="Streaming relay", method=_METHOD, rows=tuple(rows))


async def _compare(
    subject: Server, reference: Server, what: str, chunks: int, rounds: int, target: Target | None
) -> list[Row]:
    await cpu_per_chunk(subject, f"{what}, warm-up", chunks)
    ours: list[float] = []
    bare: list[float] = []
    for number in range(rounds):
        bare.append(await cpu_per_chunk(reference, f"{what}, round {number}", chunks))
        ours.append(await cpu_per_chunk(subject, f"{what}, round {number}", chunks))
    beside = tuple({"reference, CPU µs per chunk": micros} for micros in bare)
    ratios = tuple(our / their for our, their in zip(ours, bare, strict=True))
    return [
        Row(what=f"chunks {what}", unit="µs", rounds=tuple(ours), target=Target("most", 60.0), beside=beside),
        Row(what=f"chunks {what}, against a relay that only copies", unit=RATIO, rounds=ratios, target=target),
    ]


async def cpu_per_chunk(server: Server, occasion: str, chunks: int) -> float:
    """Microseconds."""
    questions = [chat(f"{occasion}, stream {number}", stream=True) for number in range(_STREAMS)]
    before = server.cpu_seconds()
    answers = await asyncio.gather(*(_ask(server, question) for question in questions))
    spent = server.cpu_seconds() - before
    for answer in answers:
        events = answer.body.count(b"data: ")
        if answer.status != 200 or events != chunks + 1 or not answer.body.endswith(b"data: [DONE]\n\n"):
            raise CannotMeasure(f"A stream came with status {answer.status} and {events} of {chunks + 1} events.")
        if answer.headers.get("x-keepgate-cache", "miss") != "miss":
            raise CannotMeasure("A stream that was to be relayed came from the cache.")
    return spent / (chunks * _STREAMS) * 1e6


async def _ask(server: Server, question: bytes) -> Answer:
    async with Client(server) as client:
        return await client.post(question)
