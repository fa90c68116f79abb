"""Semantic caches of several projects under one stream of questions, each a program for an environment of its own.

What all of them import, `stream.py`, needs nothing but the standard library. `vcache.py` is none of these programs: it
is a policy for the simulated streams.
"""
