"""The backend's commands: ``keepgate backend``, ``plan``, ``quantize``, ``eval`` and ``profile``.

Each is a module with ``run``: `serve` for ``keepgate backend`` (read it first), which becomes `server_process`, and
`plan`, `quantize`, `eval` and `profile`; `check` is the engine's part of ``keepgate doctor``, `rank` a process of an
engine in parallel. `command_line` has what they share. Modules import torch only once their arguments are known to be
right. Uses `api`, `chat`, `checkpoints`, `engine`, `evaluation`, `model_loader`, `models`, `profiling`, `quantization`,
`quantized_weights`, `runners`, `speculation`, `text`, the package `prefix_store` and the package `telemetry`.
"""
