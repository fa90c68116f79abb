"""Sends a request of a batch to the gateway itself, so that it is cached, shared and routed as every other."""

import asyncio
import email.utils
import io
import itertools
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from gateway.batches.results import Failure, Outcome, Response

# The priority tells the gateway that the request may wait for others.
_HEADERS = {"Content-Type": "application/json", "User-Agent": "keepgate", "x-keepgate-priority": "batch"}
_MAX_ANSWER = 64 * 2**20
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500
_LONGEST_RETRY_AFTER = 600.0


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request is sent, and the pauses between, in seconds: each twice as long as the one before."""

    attempts: int = 12
    first_pause: float = 1.0
    longest_pause: float = 60.0

    def pause(self, attempt: int) -> float:
        """The pause after attempt 1, 2, …: from half of its length to all of it, so that not all come back at once."""
        full: float = min(self.longest_pause, self.first_pause * 2.0 ** (attempt - 1))
        return full * random.uniform(0.5, 1)  # noqa: S311  # no secret


class Sender:
    """Sends to the gateway at `url`. `slots` bounds the requests of all batches that are under way at the same time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, slots: asyncio.Semaphore, retries: Retries) -> None:
        self._session = session
        self._url = url
        self._slots = slots
        self._retries = retries

    async def send(self, endpoint: str, headers: Sequence[Sequence[str]], body: bytes) -> Outcome:
        """What becomes of the request, once it has been answered or tried often enough. `headers` are pairs."""
        sent = CIMultiDict([*((name, value) for name, value in headers), *_HEADERS.items()])
        for attempt in itertools.count(1):
            answer = await self._send_once(endpoint, sent, body)
            if attempt == self._retries.attempts or not answer.may_change:
                break
            await asyncio.sleep(max(answer.retry_after, self._retries.pause(attempt)))
        return await asyncio.to_thread(_outcome_of, answer)

    async def _send_once(self, endpoint: str, headers: CIMultiDict[str], body: bytes) -> "_Answer":
        url = URL(self._url + endpoint, encoded=True)
        # To itself, whose certificate is for the name that clients use, not for this address.
        request = self._session.post(url, data=io.BytesIO(body), headers=headers, allow_redirects=False, ssl=False)
        try:
            async with self._slots, request as response:
                received = bytearray()
                async for chunk in response.content.iter_any():
                    received += chunk
                    if len(received) > _MAX_ANSWER:
                        return _Answer(failure=Failure("answer_too_long", f"It is over {_MAX_ANSWER} bytes."))
                return _Answer(response.status, response.headers, bytes(received))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"The gateway gave no answer: {type(error).__name__}."
            return _Answer(failure=Failure("connection_error", reason), may_change=True)


class _Answer:
    """What came back: a response, or a failure. With `may_change` another attempt may have another answer."""

    def __init__(
        self,
        status: int = 0,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes = b"",
        failure: Failure | None = None,
        may_change: bool = False,
    ) -> None:
        self.status = status
        self.body = body
        self.failure = failure
        self.request_id = headers.get("x-request-id", "")
        self.retry_after = min(_seconds(headers.get("Retry-After", "")), _LONGEST_RETRY_AFTER)
        is_temporary = status == _TOO_MANY_REQUESTS or status >= _SERVER_ERRORS
        self.may_change = may_change or (is_temporary and headers.get("x-should-retry") != "false")


def _seconds(retry_after: str) -> float:
    """Retry-After (RFC 9110, section 10.2.3) in seconds; 0 for what cannot be read."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _outcome_of(answer: _Answer) -> Outcome:
    if answer.failure is not None:
        return Outcome(error=answer.failure)
    try:
        answer.body.decode()
        body = msgspec.json.format(answer.body, indent=-1)  # on one line
    except (ValueError, RecursionError):
        body = b""
    if not body.startswith(b"{"):
        reason = f"The answer with status {answer.status} is no JSON object."
        return Outcome(error=Failure("invalid_answer", reason))
    return Outcome(Response(answer.status, answer.request_id or f"req_{secrets.token_hex(16)}", msgspec.Raw(body)))
