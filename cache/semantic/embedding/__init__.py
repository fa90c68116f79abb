"""Texts to vectors: a sentence-transformers model, computed by ONNX Runtime where that is the same, else by torch."""
