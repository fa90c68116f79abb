"""Triton kernels of the CUDA runner, each with the function that launches it.

A launcher checks nothing: shapes and dtypes are what its docstring says. Every kernel also runs on the CPU, in Triton's
interpreter, which is how the tests compare them with plain torch on a machine without a GPU.

Uses `backend.quantized_weights` and nothing else of the backend. Read `paged_decode.py` first; for quantised weights
`quantized_weight.py`, then `quantized_matmul.py`.
"""
