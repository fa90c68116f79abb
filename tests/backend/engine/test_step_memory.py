"""A step that does not fit the memory ends its requests and not the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# The address space is limited once the model is there: the first step of 2,048 rows finds no room, the next ones do.
# The MLP is so wide that such a step takes 64 MiB.
SCRIPT = """
import dataclasses
import resource
from backend.engine.engine import Engine
from backend.engine.sequence import SamplingParams, Sequence
from backend.runners.fused.runner import FusedRunner
from backend.text.detokenizer import Detokenizer
from tests.backend.conftest import built_library
from tests.backend.runners.cuda.random_model import random_weights
from tests.backend.tiny_model import CONFIG, token_bytes

config = dataclasses.replace(CONFIG, num_layers=1, intermediate_size=8192)
engine = Engine(FusedRunner(built_library(), config, random_weights(config), 300, 4800, 1), 2, 2048)

def ask(number, length):
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.add(Sequence(number, [7] * length, params, Detokenizer(token_bytes()), number))
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                print(number, output.finish_reason.value, flush=True)

ask(0, 20)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), limit[1]))
ask(1, 4000)
ask(2, 20)
resource.setrlimit(resource.RLIMIT_AS, limit)
ask(3, 4000)
"""


def test_a_step_without_memory_is_shed_and_the_engine_goes_on() -> None:
    """A prompt whose step has no memory is shed, others are answered, and it is answered once there is memory."""
    # The allocator gives back at once what is larger: no room that loading has left is taken for the step.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 length", "1 shed", "2 length", "3 length"]
