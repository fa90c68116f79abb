"""Collected where TEST_VLLM names an environment with vLLM: `make test-vllm` makes one."""

import os

collect_ignore_glob = [] if "TEST_VLLM" in os.environ else ["test_*.py"]
