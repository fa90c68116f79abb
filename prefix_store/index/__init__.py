"""Which owner holds which KV block: an index in Redis, never the bytes themselves."""
