"""Checkpoints with quantised weights: the formats that others write, and the one that is written here."""
