"""What a model makes of a text, and how far its quantised weights lead it away from what it was."""
