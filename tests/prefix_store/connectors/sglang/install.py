"""Install SGLang for a CPU: `python -m tests.prefix_store.connectors.sglang.install FOLDER`. Some 2.5 GB."""

import sys
from pathlib import Path

from tests.prefix_store.connectors.vllm_server.install import install

if __name__ == "__main__":
    sys.exit(install("SGLang for a CPU", Path(__file__).with_name("requirements.txt")))
