"""Quantised weights: schemes, methods, files."""
