"""Between text and token ids: tokenizing, incremental detokenizing, stop strings and the limit of the context.

Knows tokenizer files but no requests and no engine. Read `detokenizer.py` first. Uses `models`.
"""
