"""Ollama's API: chats, prompts and embeddings, and what its clients ask about models.

Read chat.py first, then fields.py and messages.py (requests), answers.py (answers) and lines.py (streams). endpoint.py
is what chat.py and generate.py share. Uses the package cache.
"""
