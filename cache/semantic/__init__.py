"""Answers to questions that mean the same: what is fuzzy about a prompt, and what must never be.

Nothing here knows a model, a store or an HTTP server in `normalize`, `text` and `guards`: they are pure functions of text.
"""
