"""Anthropic's Messages: requests, answers, streams and errors, to chat completions and back.

surface.py is the surface; read it first, then answers.py. requests.py reads a request: its conversation with
conversation.py and content.py, its tools with tools.py. assistant_turn.py has the turns of the model, in requests and
answers alike; arguments.py serves the answers. A stream is read by assembler.py, made of chunks by
translator.py, and made of an answer by streams.py. errors.py has the errors. Uses http and the package cache.
"""
