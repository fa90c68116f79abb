"""Timing the engine from outside: what is recorded of it, and that nothing is left in it."""

from __future__ import annotations

import pytest

from backend.engine import engine as engine_module
from backend.engine import step as step_module
from backend.engine.engine import Engine
from backend.engine.scheduler import Scheduler
from backend.profiling.instrumentation import TIMED, Recorder, instrumented, runner_class
from tests.backend.engine.test_engine_overlap import Device
from tests.backend.tiny_model import EngineClient, reference


def replaced_functions() -> list[object]:
    """Everything that a profile replaces, as it is now."""
    owners = [(owner, name) for owner, name, _ in TIMED]
    owners += [(Engine, "step"), (engine_module, "collect_result"), (runner_class(reference(4)), "run")]
    return [vars(owner)[name] for owner, name in owners]


def answered(recorder: Recorder | None = None) -> list[str]:
    """The texts of two requests that arrive one after the other."""
    client = EngineClient(Engine(reference(32), max_batch=4, step_tokens=16, shares_prefixes=False))
    client.submit(0, list(range(10, 30)), 6)
    for _ in range(3):
        client.step()
    client.submit(1, list(range(40, 70)), 4)
    client.run()
    return [client.completions[number].text for number in range(2)]


def test_nothing_is_left_in_the_engine() -> None:
    """The functions are the same objects afterwards, also if the profile fails; so a served request costs nothing."""
    before = replaced_functions()

    def fail() -> None:
        with instrumented(reference(4)):
            assert all(now is not then for now, then in zip(replaced_functions(), before, strict=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(now is then for now, then in zip(replaced_functions(), before, strict=True))


def test_each_step_is_recorded_with_what_it_computed() -> None:
    """Chunks of a prompt, decode steps and both together, in the order of the steps; answers are the same."""
    plain = answered()
    with instrumented(reference(4)) as recorder:
        assert answered() == plain
    steps = recorder.steps
    assert [step.kind for step in steps] == ["prefill", "prefill", "decode", "mixed", "mixed", *["decode"] * 3]
    assert [(step.chunks, step.prefill_rows, step.logits_rows) for step in steps[:3]] == [
        (((0, 16),), 16, 0),
        (((16, 4),), 4, 1),
        (((20, 1),), 0, 1),
    ]
    assert steps[3].chunks == ((21, 1), (0, 15))
    assert (steps[3].prefill_rows, steps[3].rows, steps[3].sequences) == (15, 16, 2)
    assert all(0 < step.model_seconds <= step.step_seconds for step in steps)
    assert recorder.most_held == 2 + 2  # the first ends before the second has its third
    named = {span.name for span in recorder.engine}
    assert named >= {"schedule", "build inputs", "prefill", "decode", "mixed", "sampling", "detokenise", "bookkeeping"}


def test_steps_that_were_launched_ahead_have_the_time_of_their_device() -> None:
    """A device computes while the host turns the tokens of the step before into text: no moment is two steps'."""
    device = Device(reference(32))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=16, shares_prefixes=False))
    with instrumented(device) as recorder:
        client.submit(0, list(range(10, 20)), 8, logprobs=None, ignore_eos=True)
        client.run()
    assert any(device.ahead)
    assert [step.kind for step in recorder.steps] == ["prefill", *["decode"] * 7]
    assert all(step.model_seconds > 0 and step.step_seconds > 0 for step in recorder.steps)
    first, last = recorder.steps[0].start, max(span.end for span in recorder.engine)
    assert sum(step.model_seconds for step in recorder.steps) <= last - first


def test_a_name_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the engine that was renamed would else go unnoticed as time that nobody had."""
    monkeypatch.delattr(step_module, "sample")
    schedule = vars(Scheduler)["schedule"]
    with pytest.raises(KeyError), instrumented(reference(4)):
        pass
    assert vars(Scheduler)["schedule"] is schedule
