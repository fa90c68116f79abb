"""Builds the bodies of answers from the engine's outputs, in OpenAI's shapes.

`builder` has what chats and completions share; read it first. `chat` and `completions` build whole answers and chunks
of streams, `embeddings` and `model_info` are whole answers only. Uses `chat`, `engine`, `requests` and `text`.
"""
