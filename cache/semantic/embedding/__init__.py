"""Sentence embeddings: a text as a unit vector, float32 [dimensions].

embedder.py batches texts; load.py chooses the encoder: native_encoder.py (C++), onnx_encoder.py or torch_encoder.py,
with the interface of encoder.py. export_cache.py makes ONNX exports and keeps them. Read embedder.py and load.py
first; docs/decisions/013-embedding-runtime.md has the measurements. Uses no other room.
"""
