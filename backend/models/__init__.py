"""What a model is, before any weight is read: its `config.json` as a frozen `ModelConfig`, and its sizes.

`hf_config.py` knows how each model family spells its configuration; `rope.py` computes rotary tables that all runners
share; `partition.py` divides a model among ranks. Read `config.py` first. Uses no other subpackage.
"""
