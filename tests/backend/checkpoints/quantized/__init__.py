"""Checkpoints with quantised weights: others' files, our own, and files that lie."""
