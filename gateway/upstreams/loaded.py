"""Which models a server has in memory, of those that it loads on demand."""

import time
from typing import Any, NamedTuple

RUNNING_PATH = "/api/ps"
"""Ollama's list of the models that are in memory."""
_LATEST = ":latest"


class LoadedReport(NamedTuple):
    """What a server has said at a time of the monotonic clock."""

    models: frozenset[str]
    at: float


def loaded_of_running(answer: dict[str, Any]) -> LoadedReport | None:
    """From an answer of Ollama's RUNNING_PATH; None if it is none."""
    running = answer.get("models")
    if not isinstance(running, list):
        return None
    names = {item.get("name") for item in running if isinstance(item, dict)}
    texts = {name for name in names if isinstance(name, str)}
    return LoadedReport(frozenset(texts | {text.removesuffix(_LATEST) for text in texts}), time.monotonic())


def loaded_of_listed(listed: list[Any]) -> LoadedReport | None:
    """From a list of models in which llama.cpp says the status of each; None if the list says none."""
    status = {
        item["id"]: item["status"].get("value")
        for item in listed
        if isinstance(item, dict) and isinstance(item.get("id"), str) and isinstance(item.get("status"), dict)
    }
    if not status:
        return None
    return LoadedReport(frozenset(model for model, value in status.items() if value == "loaded"), time.monotonic())
