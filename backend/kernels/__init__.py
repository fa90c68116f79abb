"""Triton kernels of the CUDA runner, each with the function that launches it.

A launcher does not check shapes and dtypes; its docstring states them. Every kernel also runs on the CPU, in Triton's
interpreter, so that tests can compare it with plain torch without a GPU.

Read `paged_decode.py` first; for quantised weights `quantized_weight.py`, then `quantized_matmul.py`. Uses
`quantized_weights`.
"""
