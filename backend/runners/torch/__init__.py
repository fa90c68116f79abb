"""The reference runner: every supported model in plain torch, on the CPU.

Every other runner is compared with it. `quantized_matmul.py` finds the fastest correct product with quantised weights,
`kv_memory.py` stores keys and values, also in int8 and fp8; `exchange.py` joins the parts of a model.

Read `runner.py` first. Uses `engine`, `model_loader`, `models`, `quantized_weights` and the package `prefix_store`.
"""
