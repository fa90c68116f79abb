"""The normal form of a prompt, by which the same question written differently is found without a model.

english.py has the words that it asks, from english.txt.gz, which scripts/english_words.py makes. Read normal_form.py
first. Uses no other subpackage.
"""
