"""Answers to questions that mean the same."""
