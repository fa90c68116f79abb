"""Answers and their keys: what was computed once, found again. Knows nothing of HTTP servers."""
