"""A client of the Files and Batch API: OpenAI's own, and what the tests often do with it."""

import json
from collections.abc import Sequence
from typing import Any

import openai
from openai.types import Batch

from gateway.batches.runner import RunnerOptions
from gateway.batches.sender import Retries
from tests.waiting import until

OPTIONS = RunnerOptions(retries=Retries(3, 0.01, 0.05), poll=0.05, tick=0.02, pause=0.05)
"""A runner that waits for little."""

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
_DEADLINE = 30.0


def request(custom_id: str, content: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    """A line of an input file: a chat, with further fields of its body."""
    body = {"model": "mock", "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class BatchClient:
    """`sdk` is OpenAI's client."""

    def __init__(self, sdk: openai.AsyncOpenAI) -> None:
        self.sdk = sdk

    async def upload(self, content: bytes) -> str:
        """The id of a new file for a batch."""
        return (await self.sdk.files.create(file=("input.jsonl", content), purpose="batch")).id

    async def create(self, *lines: dict[str, Any], **fields: Any) -> Batch:
        """A batch of these lines."""
        return await self.create_of(await self.upload(jsonl(lines)), **fields)

    async def create_of(self, file_id: str, **fields: Any) -> Batch:
        """A batch of an uploaded file, of chats unless `fields` say otherwise."""
        return await self.sdk.batches.create(
            **{"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
        )

    async def until(self, batch_id: str, *statuses: str) -> Batch:
        """The batch once its status is one of these."""

        async def has_come() -> bool:
            return (await self.sdk.batches.retrieve(batch_id)).status in statuses

        await until(has_come, _DEADLINE)
        return await self.sdk.batches.retrieve(batch_id)

    async def ended(self, batch_id: str) -> Batch:
        return await self.until(batch_id, *ENDED)

    async def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """The lines of an output or error file, by their custom_id, of which none is there twice."""
        if file_id is None:
            return {}
        text = (await self.sdk.files.content(file_id)).text
        lines = [json.loads(line) for line in text.splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        assert len({line["id"] for line in lines}) == len(lines)
        return found

    async def texts(self, batch: Batch) -> dict[str, str]:
        """The text of each answer of a batch, by its custom_id."""
        return {
            custom_id: line["response"]["body"]["choices"][0]["message"]["content"]
            for custom_id, line in (await self.lines(batch.output_file_id)).items()
        }
