"""The CUDA runner: a llama-family decoder of cuBLAS products and Triton kernels, with CUDA graphs for decoding.

`decoder.py` is the model, `runner.py` the `ModelRunner` around it, `graphs.py` records decode steps, and `kv_blocks.py`
copies KV blocks to and from the host beside the steps.

Imported only where Triton is installed, except `choice.py`. Read `runner.py` first. Uses `checkpoints`, `engine`,
`kernels`, `model_loader`, `models`, `quantized_weights`, `torch` and the package `prefix_store`.
"""
