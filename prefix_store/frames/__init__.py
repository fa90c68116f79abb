"""Frames: the byte format of a KV block outside an engine, with a header that is verified on every read.

layout.py describes a block's tensors, frame.py the header and checksum, segments.py copies between an engine's memory
and contiguous bytes. Read frame.py first. Uses no other subpackage.
"""
