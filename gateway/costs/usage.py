"""The tokens of an answer as its upstream bills them."""

import msgspec


class TokenUsage(msgspec.Struct, frozen=True, gc=False):
    """`prompt` and `completion` are all tokens of each; the other counts are parts of them.

    `read` and `written` are tokens of the prompt cache, `written_1h` those of `written` that are kept for an hour.
    `tier` is the service tier that the answer names, "" for none.
    """

    prompt: int
    completion: int = 0
    read: int = 0
    written: int = 0
    written_1h: int = 0
    prompt_audio: int = 0
    completion_audio: int = 0
    reasoning: int = 0
    tier: str = ""
