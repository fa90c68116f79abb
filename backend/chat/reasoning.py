"""Separates what a model thinks from what it answers, while the answer is generated."""

from __future__ import annotations

from dataclasses import dataclass

from backend.chat.tool_parser import partial_marker_length

# What families write around their thoughts: Qwen 3, DeepSeek R1, SmolLM3 and others; Magistral.
_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of one family."""

    begin: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with an open thought, so that the answer begins within it."""
        return prompt.rstrip().endswith(self.begin)


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that a chat template mentions; None: the model does not write its thoughts apart."""
    return next((ReasoningFormat(begin, end) for begin, end in _MARKERS if end in template), None)


class ReasoningParser:
    """Parses one answer. Text that may be the start of a marker is held back until more text decides.

    white space <think> reasoning </think> white space content

    Args:
        opened: whether the answer begins within a thought.
    """

    def __init__(self, reasoning_format: ReasoningFormat, opened: bool) -> None:
        self._format = reasoning_format
        self._state = "reasoning" if opened else "start"
        self._blank = True
        """Nothing of the thoughts so far but line breaks."""
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether a thought is open."""
        return self._state == "reasoning"

    @property
    def in_content(self) -> bool:
        """Whether the thoughts are over."""
        return self._state in ("after", "content")

    def add(self, text: str) -> tuple[str, str]:
        """Parses the next part of the answer; returns (reasoning, content)."""
        self._held += text
        reasoning = ""
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            reasoning = self._reasoning()
        return reasoning, self._content() if self.in_content else ""

    def finish(self) -> tuple[str, str]:
        """What was held back at the end of the answer."""
        held, self._held = self._held, ""
        if self._state == "after":  # white space between the thoughts and an answer that never began
            return "", ""
        return (held, "") if self._state == "reasoning" else ("", held)

    def _start(self) -> None:
        begin, text = self._format.begin, self._held.lstrip()
        if text.startswith(begin):
            self._state, self._held = "reasoning", text[len(begin) :]
        elif not begin.startswith(text):
            self._state = "content"

    def _reasoning(self) -> str:
        if self._blank:
            self._held = self._held.lstrip("\n")
            self._blank = not self._held
        end, text = self._format.end, self._held
        at = text.find(end)
        if at >= 0:
            self._state, self._held = "after", text[at + len(end) :]
            return text[:at]
        kept = partial_marker_length(end, text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _content(self) -> str:
        if self._state == "after":
            self._held = self._held.lstrip()
            if not self._held:
                return ""
            self._state = "content"
        held, self._held = self._held, ""
        return held
