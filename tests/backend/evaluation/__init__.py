"""Perplexity, divergence and the command that reports them."""
