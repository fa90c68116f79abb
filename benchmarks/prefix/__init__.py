"""Figures of the prefix (KV) store: bandwidth, index, trace replay, TTFT, faults, loss of disk codecs.

Each figure has a coroutine `measure(quick)`; most are also programs that measure in a process of their own.
`engines.py` starts backends with a prefix store, `chaos_engine.py` one that is killed at random.
Uses `benchmarks.harness`. Read `ttft.py` first.
"""
