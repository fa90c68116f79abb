"""One model on several processes of a host: each has some layers, and of each layer some heads and inner features.

`runner.py` is rank 0's `ModelRunner`: it sends each step to the other ranks, which `ranks.py` starts and watches;
`messages.py` is what they say to each other, `settings.py` how the model is computed. `parts.py` builds what computes a
rank's part with the torch runner or, on a device, the CUDA runner, and `part_runner.py` runs steps on it.
`part_exchange.py` joins the parts of a layer, `micro_batches.py` keeps the stages of a pipeline at work,
`communicator.py` moves tensors between ranks with the groups of `process_group.py`, `shared_exchange.py` the small and
many ones among ranks of a stage on a CPU, and `shared_memory.py` holds the KV memory of all of them there.

Read `runner.py` first. Uses `checkpoints`, `cuda`, `engine`, `model_loader`, `models`, `quantized_weights`
and `torch`.
"""
