"""Evaluates a model on a text: perplexity, and the KL divergence from a reference.

`evaluate` loads the models and makes the report; read it first. `scores` runs the text's windows, `perplexity` sums
them up. Uses `engine`, `model_loader`, `models` and `text`.
"""
