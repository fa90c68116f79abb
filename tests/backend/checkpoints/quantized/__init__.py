"""Checkpoints with quantised weights: other packages' files, files written here, and invalid files."""
