"""Figures of the gateway: exact hits, added latency, relay, store failure, memory, inspection, and upstreams' caches.

Each module has a coroutine `measure(quick)` that returns a `Figure`; `exact_hits.py` is the shortest to read first.
The gateway runs as a process of its own and is measured over HTTP, except for `prompt_caches.py`, which has a clock of
its own, and `routing.py` and `kv_events.py`, which simulate upstreams. Uses `benchmarks.harness`, and for prompt caches
the rules of billing in `tests`.
"""
