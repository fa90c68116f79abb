"""The surface of OpenAI's Responses API: its requests, answers and streams as chat completions, and back.

Read surface.py first: one method for each direction. requests.py reads a request's fields, input_items.py its items and
tools.py its tools; answers.py and output_items.py translate answers, and what has no name in the other form is kept as
gateway/surfaces/differences.py has it; streams.py and events.py are about streams; stored_responses.py answers for
responses that were kept. Uses http and the package cache.
"""
