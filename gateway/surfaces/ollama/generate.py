"""POST /api/generate: one prompt.

A prompt is the only user message of a chat. With `raw`, or with a `suffix`, it is a request for completions. Its field
`raw` keeps the answer apart from those of completions' own clients: Ollama's says nothing of where it comes from.
"""

from collections.abc import Mapping

from cache.entries.entry import Family
from gateway.errors import InvalidRequest
from gateway.surfaces.ollama.answers import GENERATE
from gateway.surfaces.ollama.endpoint import OllamaSurface
from gateway.surfaces.ollama.fields import common_fields, streams, text_field
from gateway.surfaces.ollama.messages import content_of
from gateway.surfaces.surface import ChatRequest, Json

_READ = ("prompt", "system", "images", "suffix", "raw", "template", "context")
_UNTRANSLATABLE = {
    "template": "other servers have a template of their own",
    "context": "send the conversation to /api/chat",
}
_UNTRANSLATABLE_IN_COMPLETIONS = {
    **_UNTRANSLATABLE,
    "system": "write it into the prompt, or leave out 'raw' and 'suffix'",
    "images": "leave out 'raw' and 'suffix'",
    "logprobs": "leave out 'raw' and 'suffix'",
}
_OF_CHATS = ("logprobs", "top_logprobs", "chat_template_kwargs", "reasoning_effort")


class OllamaGenerateSurface(OllamaSurface):
    """Prompts."""

    family: Family = "ollama.generate"
    paths = ("/api/generate",)
    shape = GENERATE

    def chat_request(self, path: str, fields: Json) -> ChatRequest:
        """An empty prompt asks for no answer: see `is_load`."""
        asked, ignored = common_fields(fields, read=_READ, produced=("messages", "tools"))
        stream, raw = streams(fields), fields.get("raw")
        prompt, system, suffix, template = (
            text_field(fields, name) for name in ("prompt", "system", "suffix", "template")
        )
        if raw is not None and not isinstance(raw, bool):
            raise InvalidRequest("'raw' must be true or false.", param="raw")
        given = {"template": template, "context": fields.get("context")}
        if raw or suffix:
            asked["raw"] = bool(raw)
            given |= {"prompt": prompt, "suffix": suffix, "system": system, "images": fields.get("images")}
        asked |= {name: value for name, value in given.items() if value not in (None, "", []) or name == "prompt"}
        if raw or suffix:
            # Ollama reads no suffix of a raw prompt.
            unsent = [name for name in ("raw", *_OF_CHATS, *(["suffix"] if raw else [])) if name in asked]
            return ChatRequest(
                asked,
                stream,
                path="/v1/completions",
                ignored=(*ignored, *unsent),
                untranslatable=_refusal(asked, _UNTRANSLATABLE_IN_COMPLETIONS),
            )
        asked["messages"] = [{"role": "system", "content": system}] if system else []
        asked["messages"].append({"role": "user", "content": content_of(prompt, fields.get("images"), "images")})
        return ChatRequest(asked, stream, ignored=ignored, untranslatable=_refusal(asked, _UNTRANSLATABLE))


def _refusal(asked: Json, reasons: Mapping[str, str]) -> InvalidRequest | None:
    """The error instead of a request without the first of these fields that is there."""
    name = next((name for name in reasons if asked.get(name)), None)
    if name is None:
        return None
    return InvalidRequest(f"'{name}' is for a server that has Ollama's API: {reasons[name]}.", param=name)
