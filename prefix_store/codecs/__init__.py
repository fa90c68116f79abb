"""Codecs: how the numbers of a KV block are stored in a frame, exactly or in fewer bits.

plain.py is exact, scaled.py stores int8 or fp8 with scales. codec.py is their interface, registry.py their names; a
new codec is a file here and a line in registry.py. Read codec.py first. Uses frames.
"""
