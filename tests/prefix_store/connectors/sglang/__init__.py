"""The storage backend under SGLang's own controller, radix cache and host pools, on a CPU."""
