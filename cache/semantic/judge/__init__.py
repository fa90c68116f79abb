"""Whether a fresh answer says what a cached one says: from embeddings and what contradicts, or by asking a model."""
