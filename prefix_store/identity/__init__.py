"""The identity of KV blocks: hash keys over the model's fingerprint, the tenant's salt and the tokens so far.

keys.py chains the hashes, fingerprint.py describes what makes two models' blocks differ, files.py and served_model.py
say it of files and of other engines' models, salts.py and tenants.py separate tenants.
Read keys.py first. Uses no other subpackage.
"""
