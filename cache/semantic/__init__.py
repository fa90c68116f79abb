"""Answers to questions that mean the same: what is fuzzy about a prompt, and what must never be.

`normalize`, `text` and `guards` know no model, no store and no HTTP server: they are pure functions of text.
"""
