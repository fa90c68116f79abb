"""Quantisation methods; runs one over a whole model.

`quantize.py` is the entry, `recipe.py` the registry: it lists the methods and maps each to its `Rounding`, the contract
in `rounding.py`. To add a method, copy `awq.py` and enter it in `METHODS` and `Recipe.rounding`. `layerwise.py`
quantises layer by layer, `partial_checkpoint.py` saves finished layers, `sensitivity.py` and `allocation.py` do mixed
precision.

Read `recipe.py` first. Uses `calibration`, `checkpoints`, `model_loader`, `models` and `quantized_weights`.
"""
