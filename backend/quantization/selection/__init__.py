"""Applies `--quantization` to a served model: chooses the scheme, quantises, and reports the loss.

`choice.py` rounds the weights of a loaded model; read it first. `automatic.py` measures which is fastest (`auto`),
`prepared.py` makes calibrated models once and caches them, `summary.py` reports schemes and sizes. Uses
`calibration`, `chat`, `engine`, `methods`, `model_loader`, `models` and `quantized_weights`.
"""
