"""A request at work in the engine, as its handler sees it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager

from aiohttp import web

from backend.api.http_body import ARRIVED
from backend.api.request_headers import is_one_shot, set_deadline, tenant_keys
from backend.api.server_state import STATE
from backend.chat.grammar import GrammarConstraint
from backend.chat.output_constraint import OutputConstraint
from backend.engine.async_engine import NOT_RUNNING, Generation
from backend.engine.engine import Output
from backend.engine.sequence import FinishReason, Sequence
from backend.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, Unavailable

_FIRST_TOKEN_NOTED: web.RequestKey[bool] = web.RequestKey("_FIRST_TOKEN_NOTED")


class OutputStream:
    """What the engine says of a request's sequences, as it arrives."""

    def __init__(
        self, request: web.Request, sequences: Many[Sequence], generation: Generation, form: OutputConstraint | None
    ) -> None:
        self._request = request
        self._state = request.app[STATE]
        self._sequences = sequences
        self._form = form
        self._generation = generation

    @property
    def more(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._generation.unfinished)

    async def take(self) -> list[tuple[int, Output]]:
        """Waits for news and returns all of it: (index of the sequence, output).

        Raises:
            DeadlineExceeded, Unavailable, GenerationFailed: a sequence has ended without being answered.
            InvalidRequest: its answer could not have the form that was asked for.
        """
        arrived = await self._generation.take()
        if any(output.num_generated or output.embedding is not None for _, output in arrived):
            self._note_first_token()
        for index, output in arrived:
            self._raise_if_failed(self._sequences[index], output)
        return arrived

    async def all(self) -> list[list[Output]]:
        """Everything about each sequence, once there is nothing more to come; raises what ``take`` does."""
        outputs: list[list[Output]] = [[] for _ in self._sequences]
        while self.more:
            for index, output in await self.take():
                outputs[index].append(output)
        return outputs

    def _note_first_token(self) -> None:
        if not self._request.get(_FIRST_TOKEN_NOTED):
            self._request[_FIRST_TOKEN_NOTED] = True
            self._state.metrics.first_token_seconds.observe(time.monotonic() - self._request[ARRIVED])

    def _raise_if_failed(self, sequence: Sequence, output: Output) -> None:
        if output.finish_reason is not None and self._form is not None:
            self._raise_if_lost(self._form, sequence)
        match output.finish_reason:
            case FinishReason.EXPIRED:
                raise DeadlineExceeded(output.error or "the request's deadline passed")
            case FinishReason.SHED:
                raise Unavailable(output.error or NOT_RUNNING)
            case FinishReason.FAILED:
                if not self._state.engine.alive:
                    raise Unavailable(NOT_RUNNING)
                raise GenerationFailed(output.error or "the engine failed while it worked on this request; try again")

    def _raise_if_lost(self, form: OutputConstraint, sequence: Sequence) -> None:
        """The caller's schema is at fault if nothing could follow, and another try would end the same way."""
        constraint = sequence.constraint
        if isinstance(constraint, GrammarConstraint) and constraint.error:
            names = " and ".join(form.fields)
            raise InvalidRequest(f"{names}: too complex to follow: {constraint.error}", form.fields[0])


@asynccontextmanager
async def generate(
    request: web.Request, sequences: Many[Sequence], form: OutputConstraint | None = None, *, converses: bool = False
) -> AsyncIterator[OutputStream]:
    """Has the engine work on sequences for this caller.

    Whatever ends the block, a client that left included, ends the sequences before the next step.

    Args:
        form: what their answers have to look like; None: any text.
        converses: whether another turn is likely to follow, where the request does not say.

    Raises:
        InvalidRequest: a header is wrong.
        QueueFull, Unavailable: the engine does not take them.
    """
    set_deadline(request, sequences)
    state = request.app[STATE]
    keys = tenant_keys(request)
    for sequence in sequences:
        sequence.keys = keys
    await state.prefixes.ask(sequences, one_shot=is_one_shot(request, default=not converses))
    generation = state.engine.submit(sequences)
    try:
        yield OutputStream(request, sequences, generation, form)
    finally:
        state.engine.release(sequences, generation)
        state.prefixes.ended(sequences)
