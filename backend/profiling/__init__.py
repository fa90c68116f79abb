"""Where time and memory of the engine go: ``keepgate profile``.

`profile` loads a model, runs a workload and puts the figures together; read it first. `workload` has the requests,
`replay` sends them, and `instrumentation` times the engine meanwhile, from outside. `attribution` makes parts of the
time, `memory` of the memory; `work` says what a step has to do, `machine` measures what the machine can do, and
`bottleneck` compares them. `report` prints it all.

Uses `api`, `checkpoints`, `engine`, `model_loader`, `models`, `prefixes`, `requests`, `responses`, `runners`,
`text` and the package `prefix_store`.
"""
