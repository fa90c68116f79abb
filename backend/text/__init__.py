"""Between text and token ids: tokenizing, incremental detokenizing, stop strings and the limit of the context.

Knows tokenizer files but no requests and no engine. Uses `backend.models` and `backend.errors`. Read `detokenizer.py`
first.
"""
