"""Weights in fewer bits: how they are kept, made, read, written and multiplied with."""
