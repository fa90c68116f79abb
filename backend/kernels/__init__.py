"""Triton kernels of the CUDA runner, one to a file, each with the function that launches it.

A launcher checks nothing: shapes and dtypes are what its docstring says. Every kernel also runs on the CPU, in Triton's
interpreter, which is how the tests compare them with plain torch on a machine without a GPU.
"""
