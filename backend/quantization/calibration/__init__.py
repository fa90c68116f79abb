"""Calibration: runs windows of text through one decoder layer at a time and sums up its matrices' inputs.

`stages.py` stops before each group of matrices; read it first. `decoder_layer.py` computes the layer in float32,
`input_statistics.py` has Hessian and mean magnitude, `divergence.py` compares predictions, `text.py` cuts windows.
Uses `checkpoints`, `model_loader`, `models` and `text`.
"""
