"""The compiled encoder: BERT in C++, built by the machine's own compiler.

encoder.py is an `Encoder`; bert_files.py reads models, layout.py arranges their weights for bert.cpp,
and build.py compiles it. Read encoder.py first. Uses no other room.
"""
