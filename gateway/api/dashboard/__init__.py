"""The dashboard at /dashboard: a page that asks the operator's routes, and shows what they answer.

dashboard.py serves the files here; index.html has the parts of the page, dashboard.js fills them in with entries.js,
engines.js and semantic.js, with what is in elements.js, and dashboard.css says how they look. The charts are uPlot's,
version 1.6.32, whose licence lies beside it. Nothing is loaded from elsewhere. Read dashboard.py first.
Uses no other subpackage.
"""
