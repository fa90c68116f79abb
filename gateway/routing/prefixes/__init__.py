"""Which upstream holds the KV blocks of which prompts.

prompt_blocks.py makes blocks of a prompt. history.py remembers who was sent which, in shared_history.py together with
other workers. views.py asks upstreams that know themselves: engine_index.py the in-repo engine, kv_events.py what vLLM
and SGLang publish. Read history.py first, then views.py. Uses http, settings, upstreams and the package cache.
"""
