"""What is printed."""

from collections.abc import Sequence
from dataclasses import fields

from gateway.commands.simulation.capacity import PLANNED, Need
from gateway.commands.simulation.figures import Figures, Fleet
from gateway.commands.simulation.run import Death, Kind, Result
from gateway.commands.simulation.traffic import Traffic
from prefix_store.replay.trace import Trace

_LAYERS = {
    "memory": "a gateway's memory",
    "redis": "Redis",
    "semantic": "the semantic cache",
    "flight": "a call that was under way",
    "miss": "a backend",
}
_KINDS: dict[Kind, str] = {
    "gateway": "gateway cores",
    "redis": "Redis nodes",
    "semantic": "semantic caches",
    "backend": "backends",
}


def report(
    trace: Trace,
    traffic: Traffic,
    fleet: Fleet,
    result: Result,
    computed: dict[str, float],
    deaths: Sequence[Death],
) -> list[str]:
    """What the simulation has found. `computed` are the utilisations of the capacity model."""
    lines = [
        f"{trace.style} trace of {trace.count:,} requests; copies side by side: {traffic.copies}, times as fast:"
        f" {traffic.rate:g}, asked again: {traffic.repeats:.0%}",
        f"Measured over {result.requests:,} requests, {result.rate:,.4g} a second.",
        *(f"{death.kind} {death.number} dies after {death.time:g} s." for death in deaths),
        "",
        "answered by",
        *(f"  {name:<26} {result.layers[layer]:>8.2%}" for layer, name in _LAYERS.items() if result.layers[layer]),
    ]
    if result.failed:
        lines += ["failed", *(f"  {why:<46} {count:>6,}" for why, count in result.failed.items())]
    if result.retried:
        lines.append(f"asked again of another backend                   {result.retried:>6,}")
    if len(result.phases) > 1:
        lines += ["", f"{'seconds':<20} {'requests':>9} {'hits':>8} {'failed':>7} {'first byte p50':>15} {'p99':>11}"]
        for phase in result.phases:
            median, slow = phase.first_byte
            lines.append(
                f"  {f'{phase.start:,.0f} to {phase.end:,.0f}':<18} {phase.requests:>9,} {phase.hits:>8.2%}"
                f" {phase.failed:>7,} {_time(median):>15} {_time(slow):>11}"
            )
        lines.append("")
    if result.block_hits:
        lines.append(f"blocks of prompts that backends held: {result.block_hits:.2%}")
    lines += ["", f"{'':<26} {'nodes':>6} {'work':>8} {'busiest':>8} {'computed':>9} {'wait p50':>11} {'p99':>11}"]
    count = {
        "gateway": fleet.gateways * fleet.workers,
        "redis": fleet.redis,
        "semantic": fleet.gateways,
        "backend": fleet.backends,
    }
    for kind, load in result.loads.items():
        median, slow = load.waits
        lines.append(
            f"  {_KINDS[kind]:<24} {count[kind]:>6} {load.mean:>8.1%} {load.most:>8.1%} {computed[kind]:>9.1%}"
            f" {_time(median):>11} {_time(slow):>11}"
        )
    lines += ["", f"{'seconds':<26} {'p50':>11} {'p99':>11}"]
    for name, (median, slow) in (
        ("to the end of a hit", result.hit),
        ("to the first byte", result.first_byte),
        ("to the end", result.total),
    ):
        lines.append(f"  {name:<24} {_time(median):>11} {_time(slow):>11}")
    most = result.loads[result.bottleneck].most
    lines += ["", f"The bottleneck are {_KINDS[result.bottleneck]}: the busiest works {most:.1%} of the time."]
    if most >= 1:
        lines.append("It cannot keep up: what waits grows for as long as such load lasts.")
    else:
        lines.append(f"With the same nodes it would work all the time at {result.saturation:,.4g} requests/s.")
    return lines


def plan(needs: Sequence[Need]) -> list[str]:
    """What rates need, a column for each."""
    rows = [
        ("requests/s", [f"{need.rate:,g}" for need in needs]),
        ("gateway cores", [f"{need.gateway_cores:,}" for need in needs]),
        ("Redis nodes", [f"{need.redis:,}" for need in needs]),
        ("backends", [f"{need.backends:,} ({need.limited_by})" if need.backends else "0" for need in needs]),
        ("clients, Gbit/s", [_gigabits(need.client_bits) for need in needs]),
        ("backends, Gbit/s", [_gigabits(need.backend_bits) for need in needs]),
        ("Redis, Gbit/s", [_gigabits(need.redis_bits) for need in needs]),
        ("one Redis node: upkeep", [f"{need.upkeep:.1%}" for need in needs]),
        ("  routed, Gbit/s", [_gigabits(need.routing_bits) for need in needs]),
    ]
    if any(need.semantic for need in needs):
        rows.insert(3, ("semantic caches", [f"{need.semantic:,}" for need in needs]))
    return [
        f"What other rates of such requests need, where each node works {PLANNED:.0%} of the time:",
        "",
        *(f"  {name:<22}" + "".join(f" {cell:>18}" for cell in cells) for name, cells in rows),
    ]


def sources(figures: Figures) -> list[str]:
    """Each figure with its source, or that it was given."""
    lines = []
    for field in fields(Figures):
        value = getattr(figures, field.name)
        source = field.metadata["source"] if value == field.default else "given"
        lines.append(f"  {field.name:<18} {_number(value):>10} {field.metadata['unit']:<9} {source}")
    return ["What each step takes (--set NAME=NUMBER):", "", *lines]


def _number(value: float) -> str:
    return f"{value * 1e6:g}e-6" if 0 < value < 0.01 else f"{value:g}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.1f} µs"


def _gigabits(bits: float) -> str:
    return f"{bits / 1e9:,.3g}"
