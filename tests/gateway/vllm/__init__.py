"""The gateway in front of a real vLLM for CPUs, in an environment of its own: `make test-vllm`."""
