"""The requests of a profile: of a file with one body in each line, or a small workload that is made up here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from backend.errors import ModelError, RequestError
from backend.model import ServedModel
from backend.protocol import ChatRequest, CompletionRequest, decode_request
from backend.requests.generation_request import GenerationRequest
from backend.requests.reader import RequestReader

_WORDS = (
    "river stone market winter engine letter garden station window mountain paper island silver bridge harvest "
    "question number history village morning doctor metal forest captain music ocean signal theory border kitchen"
)
_LENGTHS = (12, 50, 150, 350)
"""Words of the made-up prompts."""
_OF_EACH = 3
_SHARED_WORDS = 64
"""Those of the same length begin alike for so many words, as prompts of one app do."""
_ANSWER_TOKENS = 32
_SEED = 20


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: its body, as it would arrive, and where it is from."""

    name: str
    """Such as ``requests.jsonl: line 3``."""
    body: bytes
    is_chat: bool


def read_item(item: WorkItem, reader: RequestReader, model: str, strict: bool = False) -> GenerationRequest:
    """Decodes, checks, renders and encodes a request, as its endpoint does.

    Raises:
        RequestError: names the field.
    """
    if item.is_chat:
        return reader.chats.read(decode_request(item.body, ChatRequest, model, strict)[0])
    return reader.completions.read(decode_request(item.body, CompletionRequest, model, strict)[0])


def requests_of(file: Path) -> list[WorkItem]:
    """The requests of a JSONL file, each the body of a chat or of a completion; they are not checked any further.

    A line may also be of OpenAI's Batch API, with the body in its field ``body``. Empty lines are left out.

    Raises:
        ModelError: the file cannot be read, has no request, or a line is none; the message names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ModelError(f"--requests {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"--requests {file}: byte {error.start} is not UTF-8") from error
    items = [_item(line, f"{file}: line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ModelError(f"--requests {file}: there is no request in it; expected a JSON object in each line")
    return items


def addressed(items: list[WorkItem], model: str) -> list[WorkItem]:
    """The same requests to this model, whatever they name."""
    return [
        WorkItem(item.name, msgspec.json.encode({**msgspec.json.decode(item.body), "model": model}), item.is_chat)
        for item in items
    ]


def _item(line: str, name: str) -> WorkItem:
    try:
        body: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: not valid JSON: {error}") from error
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    if not isinstance(body, dict):
        raise ModelError(f"{name}: expected a JSON object, the body of a chat or of a completion")
    if ("messages" in body) == ("prompt" in body):
        found = "both" if "messages" in body else "neither"
        raise ModelError(f"{name}: expected either the field messages (a chat) or prompt (a completion), found {found}")
    return WorkItem(name, msgspec.json.encode(body), "messages" in body)


def check(items: list[WorkItem], reader: RequestReader, model: str, strict: bool) -> int:
    """Reads all requests once, so that a wrong one is found before anything is measured.

    Returns:
        The most sequences that one of them has.

    Raises:
        ModelError: names the line and the field.
    """
    most = 1
    for item in items:
        try:
            most = max(most, len(read_item(item, reader, model, strict).sequences))
        except RequestError as error:
            raise ModelError(f"{item.name}: {error}") from error
    return most


def made_up(model: ServedModel) -> list[WorkItem]:
    """Twelve prompts of four lengths, in an order that mixes them, with greedy answers of 32 tokens.

    The longest takes half of a short context. They are chats if the model has a template.
    """
    longest = max(_LENGTHS[0], model.max_context // 4)  # a word is two tokens at most, for most tokenizers
    draw = random.Random(_SEED)  # noqa: S311  # no secret
    words = _WORDS.split()
    texts = []
    for length in (min(length, longest) for length in _LENGTHS):
        shared = draw.choices(words, k=min(_SHARED_WORDS, length // 2))
        texts += [" ".join([*shared, *draw.choices(words, k=length - len(shared))]) for _ in range(_OF_EACH)]
    draw.shuffle(texts)
    fields = {
        "model": model.name,
        "max_tokens": min(_ANSWER_TOKENS, max(1, model.max_context // 8)),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    is_chat = model.tokenizer.chat_template is not None
    return [
        WorkItem(f"prompt {number}", msgspec.json.encode({**fields, **_prompt(text, is_chat)}), is_chat)
        for number, text in enumerate(texts, 1)
    ]


def _prompt(text: str, is_chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
