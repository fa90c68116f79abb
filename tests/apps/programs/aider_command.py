# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""aider, which edits a file."""

from command import FOLDER, command
from program import KEY, MODEL, V1, run

QUIET = (
    "--yes-always", "--no-git", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings",
    "--analytics-disable", "--no-auto-lint", "--no-pretty", "--map-tokens", "0", "--edit-format", "whole",
)  # fmt: skip


def edit():
    file = FOLDER / "hello.py"
    file.write_text("")
    to = ("--model", f"openai/{MODEL}", "--openai-api-base", V1, "--openai-api-key", KEY)
    command("aider", *to, *QUIET, "--message", "Make hello.py say hello.", file.name)
    return file.read_text()


run(edit)
