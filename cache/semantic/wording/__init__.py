"""What two questions differ in, read off their words: vetoes, and evidence for a policy.

text.py reads a question, difference.py compares two of nearly the same words, comparison.py one with several that have
one answer. Read comparison.py first. Uses normal_form.
"""
