"""Figures of the semantic cache: error budget, judge, vetoes, latency, index, predictions, languages, other caches.

Each figure has a coroutine `measure(quick)`. `intent_data.py` and `labelled_answers.py` read the data sets,
`peer_caches/` runs other projects' caches.
`fit_judge.py` writes the coefficients of the default judge. Uses `benchmarks.harness`. Read `streams.py` first.
"""
