"""A model at a server with OpenAI's embeddings API: a deadline for a call, and no call while it is known to be down."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import xxhash

from cache.errors import StoreUnavailable
from cache.semantic.embedding.encoder import Vectors, unit, well_formed
from cache.semantic.embedding.errors import EmbeddingFailed, ModelChanged
from cache.semantic.model_server import BadReply, endpoint, post
from cache.stores.breaker import Breaker

_PROBE = "What is the capital of France?"
# Of one text, computed twice by one model: half floats and other batches move it less.
_MIN_COSINE = 0.99
# So many of its largest numbers, by place and sign, tell a model from others.
_LARGEST = 4
_MAX_BYTES = 16 * 2**20
# A longer reply takes more than a millisecond to read.
_READ_AT_ONCE = 64 * 2**10
# Longer than a quiet gateway is without a question: a new connection may take longer than a lookup has.
_IDLE_CONNECTION_SECONDS = 300.0
# The texts are at fault, not the server.
_REFUSALS = (400, 413, 422)


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float]


class _Reply(msgspec.Struct):
    data: list[_Embedding]


_decode = msgspec.json.Decoder(_Reply).decode


@dataclass(frozen=True, slots=True)
class EmbeddingServer:
    """A server, and the name that its model has there.

    Args:
        url: with or without ``/v1`` (or another version) and ``/embeddings``.
        key: sent as a bearer token, if not empty; never shown.
        prompt: put before every text.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
    prompt: str = ""

    @property
    def name(self) -> str:
        """For display: the model and the host."""
        return f"{self.model} at {urlsplit(self.url).netloc}"

    @property
    def endpoint(self) -> str:
        return endpoint(self.url, "embeddings")

    async def ask(self, session: aiohttp.ClientSession, texts: list[str]) -> Vectors:
        """Unit vectors of the texts, float32 [len(texts), dimensions]; NaN for one without a direction.

        Raises EmbeddingFailed if the server refuses the texts, BadReply for a reply without their vectors, and what
        aiohttp raises.
        """
        body = {"model": self.model, "input": [well_formed(self.prompt + text) for text in texts]}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            received = await post(session, self.endpoint, body, headers, _MAX_BYTES)
        except BadReply as error:
            if error.status in _REFUSALS:
                raise EmbeddingFailed(f"{self.name} refuses these texts with status {error.status}") from error
            raise
        if len(received) <= _READ_AT_ONCE:
            return _vectors(received, len(texts))
        return await asyncio.to_thread(_vectors, received, len(texts))

    async def probe(self, session: aiohttp.ClientSession) -> Vectors:
        """The vector of a text that is always the same, float32 [dimensions]. Raises as `ask` does."""
        vector: Vectors = (await self.ask(session, [_PROBE]))[0]
        if np.isnan(vector).any():
            raise BadReply("its vectors have no direction")
        return vector


def _vectors(reply: bytes, count: int) -> Vectors:
    try:
        rows = {each.index: each.embedding for each in _decode(reply).data}
        vectors = np.array([rows[index] for index in range(count)], np.float32)
    # ValueError: rows of unequal lengths, and bytes that are not UTF-8.
    except (msgspec.DecodeError, RecursionError, KeyError, ValueError) as error:
        raise BadReply("the reply has no embedding for each text") from error
    if vectors.ndim != 2 or not vectors.size:
        raise BadReply("the reply has empty embeddings")
    return unit(vectors)


class ServerModel:
    """The model of a server: use it through an embedder, while the `watch` of its breaker runs.

    A server that fails, or answers later than its deadline, costs the callers of one batch. It is not called again
    until it has answered a probe, always of the same text. Another vector than the first one is another model, with
    which `watch` raises ModelChanged.
    """

    def __init__(
        self, session: aiohttp.ClientSession, server: EmbeddingServer, probed: Vectors, deadline: float
    ) -> None:
        """`probed` is what the server gave at the start; `deadline` the seconds for a call."""
        self.name = server.name
        self.dimensions = probed.shape[0]
        # A server may have another model under the same name later, and computes the same one not to the last bit.
        largest = sorted(np.argsort(-np.abs(probed))[:_LARGEST].tolist())
        signs = [f"{place}{'+' if probed[place] > 0 else '-'}" for place in largest]
        identity = "\0".join([server.endpoint, server.model, server.prompt, str(self.dimensions), *signs])
        self.fingerprint = xxhash.xxh3_128_hexdigest(identity.encode())
        self.failures = 0
        self.breaker = _breaker(server, self._probe, deadline)
        self._session = session
        self._server = server
        self._probed = probed
        self._deadline = deadline

    async def encode(self, texts: list[str]) -> Vectors:
        try:
            vectors = await self.breaker.call(lambda: self._server.ask(self._session, texts), self._deadline)
        except StoreUnavailable as error:
            self.failures += 1
            raise EmbeddingFailed(str(error)) from error
        if vectors.shape[1] != self.dimensions:
            failure = EmbeddingFailed(f"{self.name} gives vectors of other dimensions than before")
            self.breaker.trip(failure)  # and the probe tells what has changed
            raise failure
        return vectors

    async def close(self) -> None:
        return

    async def _probe(self) -> None:
        vector = await self._server.probe(self._session)
        if len(vector) != self.dimensions or float(vector @ self._probed) < _MIN_COSINE:
            raise ModelChanged(f"{self.name} is another model than before")


@asynccontextmanager
async def open_models(server: EmbeddingServer, deadlines: Sequence[float]) -> AsyncIterator[list[ServerModel]]:
    """The model for each deadline, over one pool of connections; waits for a server that is down.

    The longest of `deadlines` is that of the first probe.
    """
    connector = aiohttp.TCPConnector(keepalive_timeout=_IDLE_CONNECTION_SECONDS)
    async with aiohttp.ClientSession(connector=connector) as session:
        probed = await _first_vector(session, server, max(deadlines))
        yield [ServerModel(session, server, probed, deadline) for deadline in deadlines]


async def _first_vector(session: aiohttp.ClientSession, server: EmbeddingServer, deadline: float) -> Vectors:
    """The vector of the probe's text, float32 [dimensions]; waits for a server that is down."""
    found: list[Vectors] = []

    async def probe() -> None:
        found.append(await server.probe(session))

    breaker = _breaker(server, probe, deadline)
    try:
        await breaker.call(probe, deadline)
    except (StoreUnavailable, EmbeddingFailed) as error:
        breaker.trip(error)  # a refusal has not
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(breaker.watch())
            await breaker.wait_closed()
            watching.cancel()
    return found[-1]


def _breaker(server: EmbeddingServer, probe: Callable[[], Awaitable[None]], deadline: float) -> Breaker:
    return Breaker(f"the embedding server of {server.name}", probe, (aiohttp.ClientError, BadReply), deadline)
