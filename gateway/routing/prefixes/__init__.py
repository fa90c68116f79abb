"""Which upstream holds the KV blocks of which prompts.

prompt_blocks.py makes blocks of a prompt. history.py remembers who was sent which, in shared_history.py together with
other workers. views.py asks upstreams that know themselves: engine_index.py the in-repo engine, kv_events.py what vLLM
and SGLang publish. event_follower.py follows that: event_sources.py says where it is, kv_subscription.py takes it, and
block_snapshots.py keeps it for workers that start later. Read history.py first, then views.py. Uses http, settings,
tenants, upstreams and the package cache.
"""
