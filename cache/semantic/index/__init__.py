"""Which questions of a partition are nearest to a new one: vectors in this process, searched by cosine.

`VectorIndex` is the whole of it to others. Imports NumPy and FAISS.
"""
