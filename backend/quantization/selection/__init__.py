"""What `--quantization` means for a model that is served: which scheme, made when, and what it costs.

`choice.py` rounds the weights of a loaded model; read it first. `automatic.py` measures which is fastest (`auto`),
`prepared.py` makes calibrated models once and keeps them, `summary.py` says what the weights are kept in.

Uses `backend.quantization.methods`, `backend.engine` (to time a step) and `backend.model_loader`.
"""
