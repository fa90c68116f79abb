"""The compiled encoder: BERT in C++, built by the machine's own compiler.

encoder.py is an `Encoder`; bert.py reads models and arranges their weights for bert.cpp, which build.py
compiles. Read encoder.py first. Uses no other room.
"""
