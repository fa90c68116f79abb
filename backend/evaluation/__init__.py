"""Evaluates a model on a text: perplexity, and the KL divergence from a reference.

`evaluate` loads the models and makes the report; read it first. `scores` runs the windows of the text, `perplexity`
sums them up. Uses `model` and the rooms below it.
"""
