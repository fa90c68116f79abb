"""The CPU runner: a whole step of a llama-family model as one C++ function, built at the first start.

`layout.py` packs weights into panels for the kernels in `step/`, `build.py` compiles them, `runner.py` calls them once
a step, and `thread_count.py` decides with how many threads.

Read `runner.py` first, then `step/fused_step.cpp`. Uses `checkpoints`, `engine`, `model_loader`, `models`,
`quantized_weights` and the package `prefix_store`.
"""
