"""A profile of the real small model, with trials and files: what it says, and that it adds up."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from backend.errors import ModelError
from backend.model import ServedModel, load_model
from backend.model_loader.source import ModelSource
from backend.profiling.page import write_files
from backend.profiling.profile import ProfileConfig, Run, profile_model
from backend.profiling.report import as_text
from backend.profiling.trace_files import write_operators
from backend.profiling.trials import Bench, run_trials
from backend.profiling.workload import addressed, made_up, requests_of
from tests.backend.conftest import ENGINE, MODEL, built_library, quiet

REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 12, "temperature": 0, "stream": True},
    {"messages": [{"role": "user", "content": "Count to nine."}], "max_tokens": 12, "n": 2, "ignore_eos": True},
    {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True},
    {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 12, "temperature": 0},
]


def written(folder: Path, *requests: dict[str, Any]) -> Path:
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    built_library()
    config = ProfileConfig(
        "default",
        ENGINE,
        requests=written(folder, *REQUESTS),
        concurrency=2,
        price_per_hour=3.6,
        changes=("int8", "batch", "prefix-store"),
        rounds=1,
        output=folder,
    )
    made = profile_model(config, quiet)
    write_files(made, folder)
    return made


def test_the_named_parts_add_up_to_the_wall_time(run: Run) -> None:
    """All but a few per cent of it has a name, on a machine of whatever speed."""
    profile = run.profile
    named = sum(part.seconds for part in profile.parts if part.name != "other")
    assert 0.9 * profile.wall_seconds < named <= 1.001 * profile.wall_seconds
    steps = sum(step.total for step in profile.steps if step.batch is None)
    inside = sum(p.seconds for p in profile.parts if p.name not in ("tokenise", "respond", "deliver", "idle", "other"))
    assert steps == pytest.approx(inside, rel=0.1)


def test_the_phases_of_each_request_add_up(run: Run) -> None:
    """A request's times follow one another, and each token has one."""
    for record in run.observed.records:
        times = [record.arrived, record.tokenised, record.queued, record.started, *record.token_times, record.ended]
        assert times == sorted(times)
        assert len(record.token_times) == sum(record.generated)
    assert run.profile.ttft.p50 <= run.profile.ttft.worst
    assert [record.generated for record in run.observed.records][1:3] == [[12, 12], [12]]


def test_the_work_is_counted(run: Run) -> None:
    """Tokens computed are those of prompts that were not cached, and of answers but for their last tokens."""
    work, steps = run.profile.workload, run.observed.recorder.steps
    assert (work.requests, work.concurrency, work.generated_tokens) == (
        4,
        2,
        sum(sum(r.generated) for r in run.observed.records),
    )
    assert work.cached_tokens == sum(record.cached_tokens for record in run.observed.records) > 0
    answers = sum(len(record.generated) for record in run.observed.records)
    rows = sum(step.rows for step in steps)
    assert rows - sum(step.prefill_rows for step in steps) == work.generated_tokens - answers


def test_the_bottleneck_comes_with_its_calculation(run: Run) -> None:
    """Bytes of all weights over the measured bandwidth, beside the time of the step."""
    profile = run.profile
    decode = next(roof for roof in profile.roofs if roof.kind == "decode")
    assert decode.weight_bytes == pytest.approx(2 * 134_515_008, rel=0.01)
    assert decode.memory_seconds == pytest.approx(
        (decode.weight_bytes + decode.kv_bytes) / profile.machine.bytes_per_second
    )
    assert decode.sentence.startswith("decode: ")
    assert re.match(r"\d+% of the time goes into (prefill|decode|mixed) steps\. ", profile.bottleneck)
    assert any(roof.sentence in profile.bottleneck for roof in profile.roofs)


def test_memory_adds_up(run: Run) -> None:
    """Weights are those of the model; what sequences held is part of the KV blocks that are there."""
    memory = run.profile.memory
    assert memory.weights >= 2 * 134_515_008
    assert 0 < memory.kv_in_use <= memory.kv_there <= memory.kv_allocated * 1.02
    assert memory.weights + memory.kv_there + memory.activations + memory.rest == memory.total


def test_the_cost_is_that_of_the_time(run: Run) -> None:
    """A machine of 3.6 dollars an hour costs a tenth of a cent a second."""
    profile = run.profile
    assert profile.cost is not None
    paid = 0.001 * profile.wall_seconds
    assert profile.cost.per_1k_generated == pytest.approx(1000 * paid / profile.workload.generated_tokens)


def test_changes_were_run(run: Run) -> None:
    """Each has figures of its own, a verdict, and equal work; restored prompts have an earlier first token."""
    assert run.profile.trials is not None
    trials = {trial.name: trial for trial in run.profile.trials.changes}
    assert list(trials) == ["int8", "batch", "prefix-store"]
    for trial in trials.values():
        assert trial.before is not None
        assert trial.after is not None
        assert len(trial.ratios) == 1
        assert trial.ratio.ttft == pytest.approx(trial.after.ttft / trial.before.ttft)
    assert "twice as many requests at a time: 4" in trials["batch"].about


async def test_a_change_that_cannot_be_tried_says_why(model: ServedModel, source: ModelSource) -> None:
    """It needs more requests, or what the settings rule out."""
    engine = dataclasses.replace(ENGINE, shares_prefixes=False)
    bench = Bench(source, model, engine, made_up(model)[:1], 1, {"prompt 1": [4]}, 100)
    batch, store = (await run_trials(bench, ("batch", "prefix-store"), 1, quiet)).changes
    assert (batch.verdict, store.verdict) == ("not tried", "not tried")
    assert batch.reason.startswith("1 requests are too few for 2 at a time")
    assert store.reason == "--no-prefix-sharing computes every prompt in full"


def test_the_tables_have_every_part(run: Run) -> None:
    """For people: parts, phases, steps, memory, trials and cost."""
    text = as_text(run.profile)
    for word in ("bottleneck: ", "wall time", "TTFT", "KV blocks", "GB/s of memory", "int8: ", "$3.6 an hour"):
        assert word in text
    assert max(map(len, text.splitlines()[1:])) <= 120


def test_the_files_are_for_perfetto_and_a_browser(run: Run, folder: Path) -> None:
    """A timeline with the steps, the requests and the batch; torch's operators; all figures; a page on its own."""
    timeline = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    kinds = Counter(event["ph"] for event in timeline)
    assert kinds["b"] == kinds["e"] == 7 * len(REQUESTS)
    assert sum(event["name"] in ("prefill", "decode", "mixed") for event in timeline if event["ph"] == "X") >= len(
        run.observed.recorder.steps
    )
    assert {event["args"]["name"] for event in timeline if event["name"] == "thread_name"} >= {"engine", "event loop"}
    assert all(event["dur"] >= 0 for event in timeline if event["ph"] == "X")
    operators = json.loads((folder / "operators.json").read_text())["traceEvents"]
    assert {"prefill step", "decode step", "sampling"} <= {event.get("name") for event in operators}
    figures = json.loads((folder / "profile.json").read_text())
    assert figures["model"] == MODEL
    assert figures["operators"][0]["seconds"] > 0


class _Links(HTMLParser):
    """Collects what a page would load, and its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]


def test_the_page_loads_nothing(run: Run, folder: Path) -> None:
    """It has a point in the roofline for each step, and a lane for each request."""
    page = (folder / "profile.html").read_text()
    found = _Links()
    found.feed(page)
    assert found.links == []
    assert "url(" not in page
    assert "<!--" not in page
    assert found.tags["circle"] == len(run.observed.recorder.steps)
    assert page.count("line 1</div>") == 1


def test_torch_operators_are_in_the_trace(source: ModelSource, tmp_path: Path) -> None:
    """Where torch computes, its operators are there by name, with their shapes."""
    model = load_model(source, dataclasses.replace(ENGINE, dtype="float32"), quiet)
    items = addressed(requests_of(written(tmp_path, {"prompt": "Once", "max_tokens": 2})), model.name)
    file = tmp_path / "operators.json"
    times = write_operators(file, model, ENGINE, items)
    events = json.loads(file.read_text())["traceEvents"]
    linear = [event for event in events if event.get("name") == "aten::linear"]
    assert len(linear) == 2 * (30 * 4 + 1)
    assert all("Input Dims" in event["args"] for event in linear)
    assert "aten::mm" in [one.name for one in times]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requests": Path("absent.jsonl")}, "--requests absent.jsonl: No such file"),
        ({"model": "absent.gguf"}, "absent.gguf: no such file"),
        ({"concurrency": 500}, "--concurrency: 500 requests with up to 1 answers each are more than the 32"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], said: str) -> None:
    """Before anything is measured."""
    with pytest.raises(ModelError) as raised:
        profile_model(dataclasses.replace(ProfileConfig("default", ENGINE), **change), quiet)
    assert said in str(raised.value)
