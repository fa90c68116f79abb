"""POST /api/embed and, its older form, /api/embeddings, as OpenAI's embeddings."""

from typing import Any

from cache.entries.answer import usage_of
from gateway.errors import InvalidRequest, UpstreamDisconnected
from gateway.surfaces.ollama.fields import PREFIX
from gateway.surfaces.surface import ChatRequest, Json

PATH = "/api/embed"
LEGACY_PATH = "/api/embeddings"

# Truncation and options are of Ollama's runtime; an upstream has its own way with long inputs.
_WITHOUT_MEANING = ("truncate", "options")
_OF_OPENAI = ("input", "encoding_format")


def embed_request(path: str, fields: Json) -> ChatRequest:
    """The request for OpenAI's embeddings. Raises InvalidRequest, naming the field."""
    name = "input" if path == PATH else "prompt"
    given = fields.get(name)
    is_list = path == PATH and isinstance(given, list) and all(isinstance(text, str) for text in given)
    if not isinstance(given, str) and not is_list:
        raise InvalidRequest(f"'{name}' must be text{' or a list of texts' if path == PATH else ''}.", param=name)
    asked: Json = {}
    ignored: list[str] = []
    for field, value in fields.items():
        if value is None or field in (name, "keep_alive"):
            continue
        if field in _OF_OPENAI or field.startswith(PREFIX):
            field = PREFIX + field
        if field in _WITHOUT_MEANING or field.startswith(PREFIX):
            ignored.append(field)
        asked[field] = value
    return ChatRequest({**asked, "input": given}, path="/v1/embeddings", ignored=tuple(ignored))


def embed_answer(path: str, answer: Json) -> Json:
    """Ollama's answer of OpenAI's list. Raises UpstreamDisconnected for a list that is none."""
    vectors = _vectors(answer.get("data"))
    if path == LEGACY_PATH:
        return {"embedding": vectors[0]}
    usage = usage_of(answer)
    return {
        "model": answer.get("model"),
        "embeddings": vectors,
        "total_duration": 0,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens if usage else 0,
    }


def _vectors(data: Any) -> list[Any]:
    items = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    numbered = {item.get("index"): item.get("embedding") for item in items if type(item.get("index")) is int}
    vectors = [numbered.get(number) for number in range(len(items))]
    if not items or not all(isinstance(vector, list) for vector in vectors):
        raise UpstreamDisconnected("The upstream lists embeddings in a form that OpenAI's API does not have.")
    return vectors
