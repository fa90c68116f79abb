"""The command `keepgate simulate`: its queues against theory, its capacity model against its queues, and what dies."""
