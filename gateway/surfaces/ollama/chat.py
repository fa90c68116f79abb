"""POST /api/chat: a conversation, with tools and images."""

from cache.entries.entry import Family
from gateway.surfaces.ollama.answers import CHAT
from gateway.surfaces.ollama.endpoint import OllamaSurface
from gateway.surfaces.ollama.fields import common_fields, streams
from gateway.surfaces.ollama.messages import chat_messages
from gateway.surfaces.surface import ChatRequest, Json

# Fields of /api/generate, which Ollama reads nowhere else.
_OF_GENERATE = ("template", "context")


class OllamaChatSurface(OllamaSurface):
    """Chats."""

    family: Family = "ollama.chat"
    paths = ("/api/chat",)
    shape = CHAT

    def chat_request(self, path: str, fields: Json) -> ChatRequest:
        """A list of messages that is empty asks for no answer: see `is_load`."""
        asked, ignored = common_fields(fields, read=("messages",), produced=_OF_GENERATE)
        asked["messages"] = chat_messages(fields.get("messages"))
        return ChatRequest(asked, streams(fields), ignored=ignored)
