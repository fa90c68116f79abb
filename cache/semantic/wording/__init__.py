"""What two questions differ in, read off their words: vetoes, and evidence for a policy.

text.py reads a question, language.py tells its language, comparison.py compares one with several that have one answer.
Read comparison.py first. Uses normal_form.
"""
