"""Every form of API, by its path and by the family of its answers."""

from aiohttp import web

from gateway.errors import GatewayError
from gateway.surfaces.generate import GenerateForm
from gateway.surfaces.messages.surface import MessagesSurface
from gateway.surfaces.ollama.chat import OllamaChatSurface
from gateway.surfaces.ollama.generate import OllamaGenerateSurface
from gateway.surfaces.openai import CHAT, COMPLETIONS
from gateway.surfaces.responses.surface import ResponsesSurface
from gateway.surfaces.surface import AnswerForm, StreamedForm, Surface
from gateway.surfaces.whole import ENDPOINTS

PROMPT_FORMS: tuple[StreamedForm, ...] = (
    CHAT,
    COMPLETIONS,
    MessagesSurface(),
    ResponsesSurface(),
    OllamaChatSurface(),
    OllamaGenerateSurface(),
    GenerateForm(),
)
BY_FAMILY: dict[str, AnswerForm] = {form.family: form for form in (*PROMPT_FORMS, *ENDPOINTS)}
BY_PATH: dict[str, StreamedForm] = {path: form for form in PROMPT_FORMS for path in form.paths}
"""The endpoints that answer a prompt."""
PROBED_PATHS = tuple(path for form in PROMPT_FORMS if isinstance(form, Surface) for path in form.paths)
"""The endpoints that an upstream may lack: it is asked for each."""


def form_of(path: str) -> AnswerForm:
    """The form of API to which a path belongs; OpenAI's where no other is known."""
    if path.startswith("/api/"):
        return BY_PATH["/api/chat"]
    return next((form for prefix, form in BY_PATH.items() if path.startswith(prefix)), CHAT)


def error_response(form: AnswerForm, error: GatewayError) -> web.Response:
    """An error as clients of this form expect it."""
    return web.Response(
        status=error.status, body=form.error_body(error), content_type="application/json", headers=error.headers
    )
