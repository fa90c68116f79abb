"""What the tokens of a question name: numbers, dates, measures, persons, negation, order, the type of question.

One file per kind. Uses lexicon.
"""
