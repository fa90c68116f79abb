"""The forms of API that clients speak, and what brings each into chat completions and back.

Read surface.py first: the contract. Each surface is a room of its own below. Uses errors and the package cache.
"""
