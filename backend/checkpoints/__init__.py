"""Checkpoint files: safetensors of any layout, quantised formats, and GGUF.

`tensor_store.py` finds tensors by name over all files of a directory; read it first. `module_tensors.py` checks the
tensors of one linear layer, `shards.py` writes files of a bounded size. The formats are in `quantized` and `gguf`.
Uses `models` and `quantized_weights`.
"""
