"""Blocks of other engines over HTTP: `BlockServer` gives away what it is asked for by hash, `PeerClient` asks."""
