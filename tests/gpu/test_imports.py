"""The tests of this folder in a process of their own, where there is a device or none."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", sorted(Path(__file__).parent.glob("test_*.py")), ids=lambda path: path.stem)
def test_kernels_are_compiled(module: Path) -> None:
    """Importing a test of this folder does not have Triton interpret the kernels, which it would then not test."""
    code = f"import os, tests.gpu.{module.stem}; assert 'TRITON_INTERPRET' not in os.environ"
    environment = {"PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=module.parents[2], timeout=120)
