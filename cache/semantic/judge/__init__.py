"""Judges, which compare two answers.

judge.py is the interface; embedding_judge.py compares embeddings and facts (answer.py, comparison.py; its
coefficients are in fitted.py), llm_judge.py calls a model. Read judge.py first. Uses language, policy and stores.
"""
