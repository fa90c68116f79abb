"""Clients of all kinds that ask without end, and check every answer."""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

import aiohttp

from tests.chaos.answers import LONG, MODELS, vector_of, words_of
from tests.chaos.forms import FORMS, Form, Json, Malformed

TOTAL = 8.0
"""Seconds for any answer: the setting `timeouts.total` of the gateways."""
DEADLINE = 4.0
"""Seconds that some clients give, in x-request-timeout."""
HASTY = 1.3
"""Seconds that others give: too few to ask another upstream when the first one hangs."""
# For the way through this program and a busy machine.
SLACK = 1.0
# Seconds between two looks at whether the event loop runs. A delay that is no longer is not counted.
_TICK = 0.05
# Seconds of a standstill that can move an answer beyond the shortest deadline, 1.3 s.
_STOOD_STILL = 0.5
# Statuses that a gateway answers when time is up.
_OUT_OF_TIME = (502, 503, 504)
# An answer that takes longer hangs.
_HUNG = 30.0
_HOT_PROMPTS = 6
_MODEL_FORMS = ("chat", "completions", "messages")
_MODEL_PROMPTS = 4
_MODEL_TOKENS = 6
# So many connections reach both workers, except once in 2 ** 15 runs.
_GREETINGS = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller of one gateway. `digest` is how upstreams name it."""

    name: str
    url: str
    key: str
    digest: str = ""
    conversation: str = ""
    """The id of a response that it may continue."""


class Kind(Enum):
    """What became of a request."""

    RIGHT = "right"
    TOLD = "told"  # a stream that ended with an error in its own form
    REFUSED = "refused"
    CUT = "cut"  # the connection to the gateway broke
    LEFT = "left"  # the client did
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and how its client behaves."""

    tenant: Tenant
    form: str
    prompt: str
    model: str
    stream: bool
    deadline: float | None = None
    is_hot: bool = False
    is_continued: bool = False
    is_computed: bool = False
    """Whether it must not be answered with what is stored."""
    reader: str = "eager"

    def __str__(self) -> str:
        kind = f"{self.form}{' stream' if self.stream else ''} by {self.tenant.name}, {self.reader}"
        return f"{kind}: {self.prompt[:60]!r}{' (continued)' if self.is_continued else ''}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`detail` is the status and code of an error, or what is wrong. Times are monotonic; `stalled` is how many seconds
    the event loop of the load stood still meanwhile: mostly the machine had no time for it, nor for the gateway.
    """

    ask: Ask
    kind: Kind
    began: float
    ended: float
    detail: str = ""
    status: int = 0
    cache: str = ""
    stalled: float = 0.0

    @property
    def is_out_of_time(self) -> bool:
        """Whether it says that time is up, which a machine that stands still may have brought about."""
        said = self.kind is Kind.TOLD or (self.kind is Kind.REFUSED and self.status in _OUT_OF_TIME)
        return said and self.stalled > _STOOD_STILL

    @property
    def is_late(self) -> bool:
        """Whether it took longer than the client or the settings allow. What is read slowly takes its time."""
        limit = _HUNG if self.ask.reader == "slow" else (self.ask.deadline or TOTAL) + SLACK
        return self.ended - self.began - self.stalled > limit


class Stalls:
    """Counts how long this program's event loop stands still."""

    def __init__(self) -> None:
        self._before = 0.0
        self._due = math.inf

    def seconds(self) -> float:
        """In all, up to now: what is running now is counted though `watch` has not been resumed yet."""
        late = time.monotonic() - self._due
        return self._before + (late if late > _TICK else 0.0)

    async def watch(self) -> None:
        """Count until it is cancelled."""
        try:
            while True:
                self._due = time.monotonic() + _TICK
                await asyncio.sleep(_TICK)
                self._before = self.seconds()
        finally:
            self._due = math.inf


class Load:
    """Clients of these tenants. `take` gets every outcome."""

    _fields: Mapping[str, object] = MappingProxyType({})  # of every request

    def __init__(self, tenants: list[Tenant], take: Callable[[Outcome], None], seed: int = 1) -> None:
        self.tenants = tenants
        self.pending: dict[int, float] = {}
        """When each request under way began."""
        self._take = take
        self._random = random.Random(seed)  # noqa: S311  # reproducible
        self._numbers = itertools.count()
        self._stalls = Stalls()
        self._run = f"{time.time():.3f}"  # no answer of an earlier run is a hit

    async def warm_up(self) -> None:
        """Ask each hot question once, so that it is a hit from now on, and make the tenants known to every worker."""
        async with _Sessions() as (_, session):
            self.tenants[:] = await asyncio.gather(*(self._known(session, tenant) for tenant in self.tenants))
            digests = {tenant.digest for tenant in self.tenants}
            assert len(digests) == len(self.tenants), "two tenants are one to the upstreams"
            asks = [ask for tenant in self.tenants for ask in self._hot(tenant)]
            outcomes = await asyncio.gather(*(self._asked(session, ask) for ask in asks))
            wrong = [f"{outcome.ask}: {outcome.detail}" for outcome in outcomes if outcome.kind is not Kind.RIGHT]
            assert not wrong, wrong

    async def run(self, clients: int, pause: float) -> None:
        """So many clients at the same time, each of which rests `pause` seconds on average after an answer."""
        async with _Sessions() as sessions, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stalls.watch())
            for _ in range(clients):
                tasks.create_task(self._client(sessions, pause))

    async def _client(self, sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession], pause: float) -> None:
        while True:
            ask = self._next()
            with self._under_way():
                outcome = await self._asked(self._random.choice(sessions), ask)
            self._take(outcome)
            await asyncio.sleep(self._random.uniform(0, 2 * pause))

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        number = next(self._numbers)
        self.pending[number] = time.monotonic()
        try:
            yield
        finally:
            del self.pending[number]

    def _next(self) -> Ask:
        draw = self._random
        tenant = draw.choice(self.tenants)
        name = draw.choice(list(FORMS))
        if draw.random() < 0.3:
            return draw.choice(self._hot(tenant))
        shared = draw.random() < 0.3  # several clients ask it at the same time
        number = int(time.monotonic() * 2) if shared else next(self._numbers)
        size = LONG if draw.random() < 0.02 else "in short"
        prompt = f"{self._run} {'shared' if shared else 'own'} {number} {size}"
        return Ask(
            tenant=tenant,
            form="chat" if shared else name,
            prompt=prompt,
            model=draw.choice(MODELS),
            stream=FORMS[name].streams and draw.random() < 0.5,
            deadline=draw.choices((None, DEADLINE, HASTY), (0.6, 0.3, 0.1))[0],
            is_continued=name == "responses" and not shared and draw.random() < 0.3,
            reader=draw.choices(("eager", "slow", "leaving"), (0.9, 0.05, 0.05))[0],
        )

    def _hot(self, tenant: Tenant) -> list[Ask]:
        names = itertools.islice(itertools.cycle(FORMS), _HOT_PROMPTS)
        return [
            Ask(tenant, name, f"{self._run} hot {number}", MODELS[0], stream=False, is_hot=True)
            for number, name in enumerate(names)
        ]

    async def _known(self, session: aiohttp.ClientSession, tenant: Tenant) -> Tenant:
        """The tenant with its digest and a conversation. Every worker has heard of it then, most likely."""

        async def greet(number: int, **fields: str) -> tuple[int, Json]:
            fields = {"model": MODELS[0], "input": f"{self._run} hello {number}", **fields}
            headers = {"Authorization": f"Bearer {tenant.key}"}
            async with session.post(tenant.url + FORMS["responses"].path, json=fields, headers=headers) as response:
                return response.status, await response.json()

        for _, answer in await asyncio.gather(*map(greet, range(_GREETINGS))):
            # A response is answered though Redis has not taken it in time: it cannot be continued then.
            status, _ = await greet(_GREETINGS, previous_response_id=answer["id"])
            if status == 200:
                text = FORMS["responses"].read_whole(answer)
                return replace(tenant, digest=text.partition(":")[0], conversation=answer["id"])
        raise AssertionError("none of its conversations was kept")

    async def _asked(self, session: aiohttp.ClientSession, ask: Ask) -> Outcome:
        form = FORMS[ask.form]
        fields = {"model": ask.model, **form.body(ask.prompt), **self._fields}
        if form.streams:
            fields["stream"] = ask.stream
        if ask.is_continued:
            fields["previous_response_id"] = ask.tenant.conversation
        headers = {"Authorization": f"Bearer {ask.tenant.key}"}
        if ask.deadline is not None:
            headers["x-request-timeout"] = f"{ask.deadline:g}"
        if ask.is_computed:
            headers["Cache-Control"] = "no-store"
        began, stalled = time.monotonic(), self._stalls.seconds()

        def outcome(kind: Kind, detail: str = "", status: int = 0, cache: str = "") -> Outcome:
            ended = time.monotonic()
            return Outcome(ask, kind, began, ended, detail, status, cache, self._stalls.seconds() - stalled)

        try:
            async with (
                asyncio.timeout(_HUNG),
                session.post(ask.tenant.url + form.path, json=fields, headers=headers) as response,
            ):
                body = await self._read(response, ask.reader)
                if body is None:
                    return outcome(Kind.LEFT)
                cache = response.headers.get("x-keepgate-cache", "")
                return outcome(*self._judged(ask, form, response.status, body), response.status, cache)
        except TimeoutError:
            return outcome(Kind.WRONG, f"no whole answer in {_HUNG:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return outcome(Kind.CUT, f"{type(error).__name__}: {error}")

    async def _read(self, response: aiohttp.ClientResponse, reader: str) -> bytes | None:
        """The body; None for a client that leaves."""
        if reader == "eager":
            return await response.read()
        if reader == "leaving":
            await response.content.read(self._random.choice((1, 200)))
            response.close()
            return None
        body = bytearray()
        while part := await response.content.read(2**15 if len(body) > 2**12 else 2**9):
            body += part
            await asyncio.sleep(0.02)
        return bytes(body)

    def _judged(self, ask: Ask, form: Form, status: int, body: bytes) -> tuple[Kind, str]:
        """What the answer is, and the code of an error or what is wrong."""
        try:
            if status != 200:
                code, message = form.refused(body)
                return Kind.REFUSED, f"{status} {code}".strip() + f": {message}"
            if ask.form == "embeddings":
                vector = form.read_whole(json.loads(body))
                is_right = vector == list(vector_of(ask.tenant.digest, ask.model, ask.prompt))
                return (Kind.RIGHT, "") if is_right else (Kind.WRONG, f"another vector: {vector}")
            right = self._text_of(ask)
            if not ask.stream:
                text = form.read_whole(json.loads(body))
                return (Kind.RIGHT, "") if text == right else (Kind.WRONG, f"another text: {text[:100]!r}")
            said = form.said(body)
        except Malformed as fault:
            return Kind.WRONG, str(fault)
        except (ValueError, KeyError, TypeError, IndexError) as fault:
            return Kind.WRONG, f"{type(fault).__name__} {fault} in {body[:200]!r}"
        if said.is_whole and said.text == right:
            return Kind.RIGHT, ""
        if said.error and right.startswith(said.text):
            return Kind.TOLD, said.error
        if not said.is_whole and not said.error:
            return Kind.WRONG, f"a stream that ends without its end: …{body[-100:]!r}"
        return Kind.WRONG, f"another text: {said.text[:100]!r}"

    def _text_of(self, ask: Ask) -> str:
        """The right answer to a question."""
        return "".join(words_of(ask.tenant.digest, ask.model, ask.prompt))


class ModelLoad(Load):
    """Clients of a real model, whose answers to a few questions are learnt while all is well."""

    _fields = MappingProxyType({"temperature": 0, "max_tokens": _MODEL_TOKENS})

    def __init__(self, tenants: list[Tenant], take: Callable[[Outcome], None], model: str) -> None:
        super().__init__(tenants, take)
        self._learnt: dict[tuple[str, str], str] = {}
        self._asks = [
            Ask(tenants[0], name, f"{self._run} Count to {number}.", model, stream=False, is_hot=True)
            for name in _MODEL_FORMS
            for number in range(_MODEL_PROMPTS)
        ]

    async def warm_up(self) -> None:
        """Ask each question once: its answer is stored."""
        async with _Sessions() as (session, _):
            for ask in self._asks:
                await self._asked(session, ask)

    def _next(self) -> Ask:
        ask, draw = self._random.choice(self._asks), self._random
        if draw.random() < 0.3:
            return ask
        reader = draw.choices(("eager", "leaving"), (0.9, 0.1))[0]
        return replace(ask, is_hot=False, is_computed=True, stream=draw.random() < 0.5, reader=reader)

    def _judged(self, ask: Ask, form: Form, status: int, body: bytes) -> tuple[Kind, str]:
        if (ask.form, ask.prompt) not in self._learnt:
            self._learnt[ask.form, ask.prompt] = form.read_whole(json.loads(body))
        return super()._judged(ask, form, status, body)

    def _text_of(self, ask: Ask) -> str:
        return self._learnt[ask.form, ask.prompt]


class _Sessions:
    """A client that keeps its connections, and one that opens a connection for each request."""

    async def __aenter__(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        timeout = aiohttp.ClientTimeout(total=None)
        self._both = (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout),
        )
        return self._both

    async def __aexit__(self, *_: object) -> None:
        for session in self._both:
            await session.close()
