"""The semantic cache: answers of similar questions, served under a bound on wrong answers.

It runs as a process of its own (service), which the gateway asks through client.py with the messages of messages.py.
The steps of a lookup: look for the same question written differently (normal_form), embed the question (embedding),
find its nearest neighbours (index), count their votes which answer is meant (policy), compare their texts (wording),
decide (policy), audit (judge). inspection keeps what operators see of decisions, evaluation measures the cache on
labelled pairs. model_server.py calls models at servers. Read messages.py first, then
service/semantic_cache.py: its `ask` says why a neighbour is served. Uses entries and stores.
"""
