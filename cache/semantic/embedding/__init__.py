"""Sentence embeddings: a text as a unit vector, float32 [dimensions].

embedder.py batches texts, for a model of this process or of a server. load.py chooses what computes a model here: the
subpackage native (C++) for BERTs, if its vectors are those of torch, or else torch; encoder.py is their interface.
server.py asks a server with OpenAI's embeddings API. Read embedder.py and load.py first;
docs/decisions/013-embedding-runtime.md has the measurements. Uses stores.
"""
