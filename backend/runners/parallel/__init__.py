"""One model on several processes of a host: each has some layers, and of each layer some heads and inner features.

`runner.py` is rank 0's `ModelRunner`: it sends each step to the other ranks, which `ranks.py` starts and watches;
`messages.py` is what they say to each other. `part_runner.py` computes a rank's part with the torch runner,
`part_exchange.py` joins the parts of a layer, `micro_batches.py` keeps the stages of a pipeline at work,
`communicator.py` moves tensors between ranks, `shared_exchange.py` the small and many ones among ranks of a stage, and
`shared_memory.py` holds the KV memory of all of them.

Read `runner.py` first. Uses `engine`, `model_loader`, `models`, `quantized_weights` and `torch`.
"""
