"""Which upstream holds the KV blocks of which prompts.

prompt_blocks.py makes blocks of a prompt, history.py remembers who was sent which. Read history.py first. Uses no other
room.
"""
