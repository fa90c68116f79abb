"""What answers cost, what hits saved, and the totals by key, team, model, upstream and layer.

Read pricing.py first: what an answer is charged. usage.py is what an upstream bills; price.py has the table of prices
(prices.json, made by scripts/prices.py); cost.py computes with both; machine.py divides the price of a machine among
the requests that it computes. ledger.py keeps the totals, in Redis where there is one; report.py adds them up.
Uses settings and the package cache.
"""
