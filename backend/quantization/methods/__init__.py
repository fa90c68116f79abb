"""Quantisation methods, and the run of one over a whole model.

`quantize.py` is the entry, `recipe.py` the registry: it lists the methods and maps each to its `Rounding`, the contract
in `rounding.py`. To add a method, copy `awq.py` and enter it in `METHODS` and `Recipe.rounding`. `layerwise.py` goes
from layer to layer, `partial_checkpoint.py` keeps finished layers, `sensitivity.py` and `allocation.py` are mixed
precision.

Uses `backend.quantization.calibration`, `backend.checkpoints` and `backend.quantized_weights`. Read `recipe.py` first.
"""
