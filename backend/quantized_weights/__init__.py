"""Quantised weights in memory: a scheme each (integers, FP8, NF4, 16-bit floats) and the linear layer in it.

`quantized_linear.py` holds both contracts, `Scheme` and `QuantizedLinear`; read it first. `grid.py` and `nibbles.py`
are the arithmetic of integer codes. To add a scheme, copy `fp8_scheme.py`, the shortest one with scales.

Uses `backend.errors` and torch; knows no files and no runner.
"""
