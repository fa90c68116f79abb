"""Whether a cached answer may be served for a question that was not asked before in these words.

A policy sees only numbers: how near the neighbours are and which of their answers are the same. It knows no text, no
store and no clock.
"""
