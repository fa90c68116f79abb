"""Quantisation methods; runs one over a whole model.

`quantize.py` is the entry, `recipe.py` the registry: it lists the methods and maps each to its `Rounding`, the contract
in `rounding.py`. To add a method, copy `awq.py` and enter it in `METHODS` and `Recipe.rounding`. `layerwise.py`
quantises layer by layer, `partial_checkpoint.py` saves finished layers, `sensitivity.py` and `allocation.py` do mixed
precision.

Uses `backend.quantization.calibration`, `backend.checkpoints` and `backend.quantized_weights`. Read `recipe.py` first.
"""
