"""The compiled encoder: BERT in C++, built by the machine's own compiler.

encoder.py builds bert.cpp and is an `Encoder`; bert.py reads models and arranges their weights for bert.cpp. Read
encoder.py first. Uses no other subpackage.
"""
