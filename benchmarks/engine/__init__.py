"""Figures of the decode engine: throughput beside transformers, vLLM and llama.cpp, loss of formats, one GPU.

Each figure has a coroutine `measure(quick)`. `decode_program.py` and `gpu.py` are programs that also run without the
harness; `servers.py` starts the servers of other engines. Uses `benchmarks.harness`. Read `decode.py` first.
"""
