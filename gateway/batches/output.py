"""The two files that a batch leaves: its answers, and why there are none."""

import hashlib
from collections.abc import Generator
from typing import Any

import msgspec

from gateway.batches.batch import Batch, BatchUsage, InputTokensDetails, OutputTokensDetails, RequestCounts
from gateway.batches.files import FileDraft, FileStore
from gateway.batches.folders import id_at
from gateway.batches.input_file import InputFile
from gateway.batches.results import Failure, Outcome, ResultsFile

_UNFINISHED = {
    "expired": Failure("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": Failure("batch_cancelled", "This request was not executed, because the batch was cancelled."),
}

_encode = msgspec.json.Encoder().encode


class _Line(msgspec.Struct):
    """A line of an output or error file, as OpenAI writes it."""

    id: str
    custom_id: str
    response: Any
    error: Failure | None


class _Usage(msgspec.Struct):
    """The usage in an answer, in the names of chat completions or of the Responses and Messages APIs."""

    usage: dict[str, Any] | None = None


def counts_of(batch_input: InputFile, results: ResultsFile) -> RequestCounts:
    completed = failed = 0
    for digest, copies in zip(batch_input.digests, batch_input.copies, strict=True):
        succeeded = results.succeeded.get(digest)
        completed += copies if succeeded else 0
        failed += copies if succeeded is False else 0
    return RequestCounts(batch_input.total, completed, failed)


class OutputWriter:
    """Writes the files of a batch that ends at `ended_at`, a Unix time, with the status `status`.

    All that it writes follows from these: done once more it writes the same, and no second file.
    """

    def __init__(self, files: FileStore, namespace: str, batch: Batch, status: str, ended_at: int) -> None:
        self._files = files
        self._namespace = namespace
        self._batch = batch
        self._ended_at = ended_at
        self._unfinished = Outcome(error=_UNFINISHED.get(status))
        self.output_file_id: str | None = None
        self.error_file_id: str | None = None
        self.usage = BatchUsage()

    def write(self, batch_input: InputFile, results: ResultsFile, lifetime: int) -> Generator[None, None, None]:
        """Write a line in each step, and publish the files at the end. A file without lines is not made."""
        with self._files.draft() as output, self._files.draft() as errors:
            for line, custom_id, request in batch_input.requests():
                outcome = results.outcome(batch_input.digests[request]) or self._unfinished
                file = output if outcome.succeeded else errors
                name = f"batch_req_{self._digest(f'line {line}', 12).hex()}"
                file.write(_encode(_Line(name, custom_id, outcome.response, outcome.error)) + b"\n")
                if outcome.succeeded and outcome.response is not None:
                    self.usage = _with(self.usage, outcome.response.body)
                yield
            self.output_file_id = self._publish(output, "output", lifetime)
            self.error_file_id = self._publish(errors, "error", lifetime)

    def _publish(self, draft: FileDraft, kind: str, lifetime: int) -> str | None:
        if not draft.size:
            return None
        file_id = id_at("file-", self._ended_at * 1_000_000, self._digest(kind, 9))
        name = f"{self._batch.id}_{kind}.jsonl"
        return draft.commit(self._namespace, name, "batch_output", lifetime, file_id, self._ended_at).id

    def _digest(self, text: str, size: int) -> bytes:
        return hashlib.blake2b(f"{self._batch.id} {text}".encode(), digest_size=size).digest()


def _with(total: BatchUsage, body: bytes) -> BatchUsage:
    """The sum with the usage of one more answer, if it has one."""
    try:
        usage = msgspec.json.decode(body, type=_Usage).usage or {}
    except msgspec.ValidationError:
        return total
    read = _number(usage, "input_tokens", "prompt_tokens")
    written = _number(usage, "output_tokens", "completion_tokens")
    cached = _number(_details(usage, "input_tokens_details", "prompt_tokens_details"), "cached_tokens")
    reasoning = _number(_details(usage, "output_tokens_details", "completion_tokens_details"), "reasoning_tokens")
    return BatchUsage(
        total.input_tokens + read,
        InputTokensDetails(total.input_tokens_details.cached_tokens + cached),
        total.output_tokens + written,
        OutputTokensDetails(total.output_tokens_details.reasoning_tokens + reasoning),
        total.total_tokens + read + written,
    )


def _number(fields: dict[str, Any], *names: str) -> int:
    """The first of these fields that is a number of tokens; 0 if none is."""
    return next((fields[name] for name in names if type(fields.get(name)) is int and fields[name] >= 0), 0)


def _details(usage: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), dict)), {})
