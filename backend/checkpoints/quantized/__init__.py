"""Quantised checkpoints: one file per format, named after it (`gptq.py`, `awq.py`, `fp8.py`, …).

`registry.py` maps a `quant_method` to its reader and holds the contract, `CheckpointReader`; read it first. To add a
format, copy `awq.py`, the shortest reader, and register the class in `registry.py`. Formats of integer codes share
`integer_weights.py`, `targets.py` tells which modules a field names, and `writer.py` writes a whole model. Uses
`models` and `quantized_weights`.
"""
