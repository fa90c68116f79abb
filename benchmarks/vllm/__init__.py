"""Figures of the prefix store under vLLM, which `make test-vllm` installs.

Each figure has a coroutine `measure(quick)`; `servers.py` starts vLLM as they need it. Uses `benchmarks.harness`, and
the servers of `tests.prefix_store.connectors.vllm_server`. Read `ttft.py` first.
"""
