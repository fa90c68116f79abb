"""Stored answers that are not served, sent along as OpenAI's `prediction`: right ones save an engine steps.

drafts.py finds the text, in what is stored of the same request or of a similar question; attempts.py puts it into the
requests for upstreams that take it; usage.py takes what became of it out of the usage that clients see. Read drafts.py
first. Uses http, routing, surfaces, upstreams and the package cache.
"""
