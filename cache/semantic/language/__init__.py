"""Reading a question: tokens, lemmas, and what they name, as pure functions of text.

text.py is a question read once, with all that the guards compare; token.py splits it, reading/ finds numbers, dates,
persons and negation in the tokens, lexicon/ has the word lists. Read text.py first. Uses no other room.
"""
