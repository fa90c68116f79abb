"""Figures of quantised weights: perplexity and KL, decode throughput, and another package's methods.

Each figure has a coroutine `measure(quick)`; `wikitext_scores.py` has the scores, `peer_packages/` the programs that
run under another project's Python. Uses `benchmarks.harness`. Read `quality.py` first.
"""
