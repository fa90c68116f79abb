"""From `--model` to tensors: finds or fetches the model, converts GGUF once, and loads its weights.

`source.py` resolves a name to a directory; `weights.py` loads that into `ModelWeights` and is to be read first.
`linears.py` visits the linear layers by name; `extra_tensors.py` refuses files that hold more than the decoder uses.
Uses `checkpoints`, `models` and `quantized_weights`.
"""
