"""OpenAI's Files and Batch API: files of tenants on disk, and batches of requests that the gateway sends to itself.

store.py has the batches on disk and files.py the files, both as folders (folders.py) that appear whole; batch.py is the
batch object. runner.py runs a batch: input_file.py checks its lines, sender.py sends their requests, results.py keeps
what is answered so that a killed batch goes on, output.py writes its files. Read runner.py first. Uses
http, proxy and tenants.
"""
