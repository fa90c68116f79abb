"""Judges, which compare two answers, and what the traffic shows of their errors.

judge.py is the interface; embedding_judge.py compares embeddings and words (answer.py; its coefficients are in
fitted.py), llm_judge.py calls a model. error_rates.py measures how often a judge errs, and repeatability.py
finds questions whose answers disagree with each other. Read judge.py first. Uses policy, stores and wording.
"""
