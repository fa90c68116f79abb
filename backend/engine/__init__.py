"""Continuous batching over a paged KV cache: scheduler, block pool, sampling, and one step after the other.

`engine.py` runs the steps in one thread, `async_engine.py` is what the HTTP server talks to. `scheduler.py` decides
what a step computes; `block_manager.py` and `block_pool.py` own the KV blocks. `model_runner.py` is the contract with
what computes, which lies in `backend.runners`.

Read `engine.py` first, then `scheduler.py`. Uses `kernels`, `models`, `quantized_weights`, `text`, the package
`prefix_store` and the package `telemetry`.
"""
