"""All places beyond an engine's own memory as one: ask where blocks are, restore them, keep them."""
