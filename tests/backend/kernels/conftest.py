"""Kernels run in Triton's interpreter here, whatever the machine has; tests/gpu runs them on a device."""

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.fail("Triton was imported before it was told to interpret; a test imports it too early", pytrace=False)
os.environ["TRITON_INTERPRET"] = "1"
