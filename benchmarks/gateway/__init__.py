"""Figures of the gateway: exact hits, added latency, relay, store failure, memory.

Each module has a coroutine `measure(quick)` that returns a `Figure`; `exact_hits.py` is the shortest to read first.
The gateway runs as a process of its own and is measured over HTTP. Uses `benchmarks.harness` only.
"""
