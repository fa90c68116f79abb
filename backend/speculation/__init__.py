"""Speculative decoding: tokens proposed to follow a sequence's last one, for the engine to verify in its next step.

`speculator.py` chooses what is proposed, and how much: nothing where it would not pay. `prompt_lookup.py` finds drafts
in text that is there, `draft_model.py` has a smaller model write them, `medusa.py` has heads that guess trees of them,
which `medusa_training.py` trains. `step_costs.py` and `acceptance.py` are what the choice goes by. How drafts are
verified is in `backend.engine`.

Read `speculator.py` first. Uses `checkpoints`, `engine`, `model_loader`, `runners`, `text` and the package
`prefix_store`.
"""
