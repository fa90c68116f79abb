"""What a measurement hands over: figures made of rows, rows made of rounds. Nothing in a row is written by hand."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

RESULTS = Path(__file__).resolve().parents[1] / "results"

RATIO = "×"  # noqa: RUF001  # the sign that is meant

# The module of each figure, by name. A figure without a file in results/ is an error of the report, not a gap in it.
FIGURES = {
    "exact_hits": "gateway.exact_hits",
    "surface_hits": "gateway.surface_hits",
    "miss_latency": "gateway.miss_latency",
    "relay_cpu": "gateway.relay_cpu",
    "streams": "gateway.streams",
    "frozen_redis": "gateway.frozen_redis",
    "decode": "engine.decode",
    "parallel": "engine.parallel",
    "speculation": "engine.speculation",
    "quality": "engine.quality",
    "memory": "gateway.memory",
    "prompt_caches": "gateway.prompt_caches",
    "routing": "gateway.routing",
    "kv_events": "gateway.kv_events",
    "inspection": "gateway.inspection",
    "redis_node": "gateway.redis_node",
    "fleet_model": "gateway.fleet_model",
    "semantic_streams": "semantic.streams",
    "semantic_judge": "semantic.judge",
    "semantic_pairs": "semantic.pairs",
    "semantic_traps": "semantic.traps",
    "semantic_latency": "semantic.latency",
    "semantic_index": "semantic.index",
    "prefix_bandwidth": "prefix.bandwidth",
    "prefix_index": "prefix.index",
    "prefix_replay": "prefix.replay",
    "prefix_chaos": "prefix.chaos",
    "prefix_ttft": "prefix.ttft",
    "prefix_steps": "prefix.steps",
    "prefix_loss": "prefix.loss",
    "quantization_quality": "quantization.quality",
    "quantization_decode": "quantization.decode",
}
# Figures that need what a machine may not have, or half an hour, or have no result yet: in the report where they have
# been measured.
OPTIONAL_FIGURES = {
    "medusa": "engine.medusa",
    "engines": "engine.peers",
    "semantic_peers": "semantic.peers",
    "encoders": "semantic.encoders",
    "quantization_peers": "quantization.peers",
    "gpu": "engine.gpu",
    "dashboard": "gateway.dashboard",
    "predictions": "semantic.predictions",
    "semantic_languages": "semantic.languages",
    "semantic_lines": "semantic.lines",
    "vllm_ttft": "vllm.ttft",
    "vllm_cost": "vllm.cost",
    "vllm_agreement": "vllm.agreement",
    "vllm_soak": "vllm.soak",
}


Beside = Mapping[str, float | str]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`aim` is what would be better still."""

    at: Literal["least", "most"]
    value: float
    aim: float | None = None

    def is_met_by(self, measured: float) -> bool:
        return measured >= self.value if self.at == "least" else measured <= self.value


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of the report. `rounds` holds the figure of every round, `beside` what stood behind each of them.

    The line's figure is the median of the rounds, or their maximum where `summary` says so. A row without a target
    is there to compare. Of the rows of a figure with the same `either`, one has to meet its target.
    """

    what: str
    unit: str
    rounds: tuple[float, ...]
    target: Target | None = None
    summary: Literal["median", "maximum"] = "median"
    either: str | None = None
    beside: tuple[Beside, ...] = ()

    @property
    def measured(self) -> float:
        return max(self.rounds) if self.summary == "maximum" else statistics.median(self.rounds)

    @property
    def is_met(self) -> bool | None:
        """By this row alone."""
        return None if self.target is None else self.target.is_met_by(self.measured)


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one file of this package measures; `method` says how, in sentences for a reader of the report."""

    figure: str
    title: str
    method: str
    rows: tuple[Row, ...]

    def verdict(self, row: Row) -> Literal["met", "met by the other", "not met", "to compare"]:
        """What has become of a row's target."""
        if row.is_met is None:
            return "to compare"
        if row.is_met:
            return "met"
        others = (other for other in self.rows if row.either is not None and other.either == row.either)
        return "met by the other" if any(other.is_met for other in others) else "not met"


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure with where and when it was measured: the content of results/<figure>.json."""

    figure: Figure
    date: str
    commit: str
    quick: bool
    seconds: float
    machine: dict[str, str]
    versions: dict[str, str]


class CannotReport(Exception):
    """A result that is missing, or is not what a measurement writes; the message names the file."""


def save(measurement: Measurement, folder: Path) -> Path:
    file = folder / f"{measurement.figure.figure}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(measurement), indent=1) + b"\n")
    return file


def load(figure: str, folder: Path) -> Measurement:
    """The saved measurement of a figure. Raises CannotReport unless it is whole."""
    file = folder / f"{figure}.json"
    if not file.exists():
        raise CannotReport(f"{file.name}: missing; `python -m benchmarks {figure}` measures it.")
    try:
        measurement = msgspec.json.decode(file.read_bytes(), type=Measurement)
    except msgspec.DecodeError as error:
        raise CannotReport(f"{file.name}: {error}") from error
    if measurement.figure.figure != figure:
        raise CannotReport(f"{file.name}: holds the figure {measurement.figure.figure!r}.")
    if not measurement.figure.rows:
        raise CannotReport(f"{file.name}: has no rows.")
    for row in measurement.figure.rows:
        if not row.rounds:
            raise CannotReport(f"{file.name}: {row.what!r} has no rounds, so nothing was measured.")
    return measurement
