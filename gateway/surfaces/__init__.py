"""The forms of API that clients speak, and what brings each into chat completions and back.

Read surface.py first: the contract. Anthropic's Messages, OpenAI's Responses and Ollama's API are subpackages of
their own; openai.py is chat completions and completions, generate.py Keepgate's own API, whole.py the endpoints whose
answers are stored as they are, and registry.py lists them all. differences.py keeps what a form has no name for,
usage.py reads billed and cached tokens under all of their names, breakpoints.py and timestamps.py serve several forms.
Uses costs, http and the package cache.
"""
