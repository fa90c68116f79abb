"""Applies `--quantization` to a served model: chooses the scheme, quantises, and reports the loss.

`choice.py` rounds the weights of a loaded model; read it first. `automatic.py` measures which is fastest (`auto`),
`prepared.py` makes calibrated models once and caches them, `summary.py` reports schemes and sizes.

Uses `backend.quantization.methods`, `backend.engine` (to time a step) and `backend.model_loader`.
"""
