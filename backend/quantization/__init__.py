"""Quantises models, for `keepgate quantize` and for `--quantization`.

`methods` has the algorithms (GPTQ, AWQ, mixed precision) and `methods/quantize.py`, which runs one over a model;
`calibration` runs texts through a decoder layer; `selection` applies `--quantization` when a model is served.

Read `methods/recipe.py` first. Decision 021 in `docs/decisions` gives the reasons for each method, with measurements.
Uses no other subpackage.
"""
