"""What computes a step: one package for each kind of runner, and the choice between them.

`choice.py` takes the fastest runner that passes `self_test.py` on this machine: `cuda`, else `fused` (C++ on the CPU),
else `torch`, the reference; `parallel` divides a model among processes. All implement `ModelRunner` of
`backend.engine.model_runner`.

Read `choice.py` first. Uses `checkpoints`, `engine`, `model_loader`, `models` and `text`.
"""
