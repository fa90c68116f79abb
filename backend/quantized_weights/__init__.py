"""Quantised weights in memory: schemes (integers, FP8, NF4, 16-bit floats) and the linear layers in them.

`quantized_linear.py` holds both contracts, `Scheme` and `QuantizedLinear`; read it first. `grid.py` has the
arithmetic of integer codes, `slices.py` takes parts of weights. To add a scheme, copy `fp8_scheme.py`, the shortest one
with scales, and say in `slices.py` how it is divided. Uses no other subpackage.
"""
