"""Connectors: put the prefix store under engines that are not in this repository.

vllm.py speaks the interface of vLLM; scheduler.py decides what is loaded and saved, worker.py does it with the store in
a thread of its own (store_thread.py), transfers.py is what they tell each other. kv_memory.py has the engine's blocks,
options.py the settings, http_api.py what operators and other engines ask. Read vllm.py first, then scheduler.py.

sglang.py speaks the interface of SGLang's HiCache; sglang_support.py has what it knows of SGLang and its host memory.
Uses codecs, eviction, frames, identity, store and tiers.
"""
