"""A replay's report as text."""

from prefix_store.replay.replay import Report


def format_report(report: Report) -> str:
    """Tables in text of 100 columns at most."""
    about = report["trace"]
    head = f"{about['style']} trace: {about['requests']:,} requests"
    capacities = [name for name in report if name.isdigit()]
    if "load" in report:
        return "\n".join([head, *_load(report, capacities)])
    lines = [
        f"{head} in {_duration(about['seconds'])}, {about['blocks']:,} blocks of {about['block_tokens']} tokens,"
        f" {about['different_blocks']:,} different",
        f"With room for everything {_percent(report['infinite']['block_hit_ratio'])} of the blocks and"
        f" {_percent(report['infinite']['token_hit_ratio'])} of the prompt tokens are found.",
    ]
    if capacities:
        lines += ["", *_policies(report, capacities), "", *_routing(report, capacities)]
    return "\n".join([*lines, "", *_advice(report)])


def _policies(report: Report, capacities: list[str]) -> list[str]:
    lines = [
        "Blocks found, by what is evicted: hazard (the store's own: what is least likely to be used again),",
        "lru (what was used least recently), belady (what will be used last: no cache can do better)",
        f"{'capacity':>12} {'hazard':>9} {'lru':>9} {'belady':>9} {'tokens found (hazard)':>24}",
    ]
    for name in capacities:
        policies = report[name]["policies"]
        shares = "".join(f" {_percent(policies[policy]['block_hit_ratio']):>9}" for policy in policies)
        lines.append(f"{int(name):>12,}{shares} {_percent(report[name]['token_hit_ratio']):>24}")
    return lines


def _routing(report: Report, capacities: list[str]) -> list[str]:
    engines = report[capacities[0]]["routing"]["engines"]
    lines = [
        f"Blocks found if {engines} engines share the capacity (lru): caches of their own and requests in turn,",
        "the same and requests sent where their prefix is, and one pool for all",
        f"{'capacity':>12} {'in turn':>9} {'by prefix':>9} {'one pool':>9}",
    ]
    for name in capacities:
        routing = report[name]["routing"]
        ways = (routing["round_robin"], routing["prefix_aware"], routing["shared"])
        lines.append(f"{int(name):>12,}" + "".join(f" {_percent(way['block_hit_ratio']):>9}" for way in ways))
    return lines


def _advice(report: Report) -> list[str]:
    advice, tokens = report["advice"], report["trace"]["block_tokens"]
    lines = [f"Other capacities, about (from {advice['sampled']:.1%} of the blocks):"]
    lines += [f"{point['capacity']:>12,} {_percent(point['block_hit_ratio']):>9}" for point in report["curve"]]
    if advice["capacity"] is not None:
        lines.append(
            f"About {advice['capacity']:,} blocks ({advice['capacity'] * tokens:,} tokens) find"
            f" {advice['share_of_infinite']:.0%} of what room for everything would."
        )
    return lines


def _load(report: Report, capacities: list[str]) -> list[str]:
    load = report["load"]
    lines = [
        "This trace has arrivals and lengths only. It does not say what prompts share: nothing can be told of hits.",
        f"{load['blocks']:,} blocks of {report['trace']['block_tokens']} tokens in {_duration(load['seconds'])}.",
    ]
    if load["blocks_per_second"] is not None and capacities:
        lines.append("How long a block would stay if no prompts shared any and the oldest went first:")
        lines += [f"{int(name):>12,} {_duration(report[name]['seconds_kept']):>9}" for name in capacities]
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
