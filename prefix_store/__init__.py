"""KV blocks of shared prefixes that outlive a request, a process and a host."""
