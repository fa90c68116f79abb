"""What computes a step: one package for each kind of runner, and the choice between them.

`choice.py` takes the fastest runner that passes `self_test.py` on this machine: `cuda`, else `fused` (C++ on the CPU),
else `torch`, the reference. All implement `ModelRunner` of `backend.engine.model_runner`.

Uses `backend.engine` (the contract), `backend.kernels`, `backend.model_loader` and `backend.models`. Read `choice.py`
first.
"""
