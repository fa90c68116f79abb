"""How the numbers of a KV block are written into a frame: as they are, or smaller and with a loss that is stated."""
