"""Where time and memory of the engine go: ``keepgate profile``.

`profile` loads a model, runs a workload and makes `figures` of it; read it first. `workload` has the requests,
`replay` sends them, and `instrumentation` times the engine meanwhile, from outside. `attribution` makes parts of the
time, `memory` of the memory; `work` says what a step has to do, `machine` measures what the machine can do, and
`bottleneck` compares them; `trials` runs other settings (`changes`) beside these. `report` prints it all, and
`page` and `trace_files` make pictures and traces of it.

Uses `api`, `checkpoints`, `engine`, `model_loader`, `models`, `prefixes`, `quantized_weights`, `requests`,
`responses`, `runners`, `text` and the package `prefix_store`.
"""
