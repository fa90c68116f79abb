"""Keepgate's prefix store: KV blocks of prompts, kept and shared beyond one engine's memory.

Layers, from the top: connectors, store and replay, peers, tiers, codecs, index and eviction, frames and identity,
errors. Uses nothing of the other packages. Read store/__init__.py first.
"""
