"""The ledger's totals as rows, for a period and by what is asked for."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.costs.ledger import COUNTERS, HOUR, Group, Ledger

DIMENSIONS = (*Group._fields, "day", "hour")
_MONEY = {"cost", "saving"}
_NANO = 10**9
_UNITS = {"h": HOUR, "d": 24 * HOUR, "w": 7 * 24 * HOUR}

Row = dict[str, Any]


class InvalidPeriod(ValueError):
    """A time that cannot be read."""


def read_time(text: str, now: float) -> float:
    """Unix time of "7d" (before now; also h and w), or of a date or time in ISO 8601, in UTC unless it says otherwise.

    Raises InvalidPeriod.
    """
    if match := re.fullmatch(r"(\d{1,5})([hdw])", text):
        return now - int(match[1]) * _UNITS[match[2]]
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidPeriod(text) from error


async def report(
    ledger: Ledger, by: Sequence[str], since: float, until: float, filters: Mapping[str, str]
) -> tuple[list[Row], Row]:
    """(rows, total) of the hours that lie in the period, even in part; money in US dollars, the highest sum first.

    `by` are DIMENSIONS, `filters` the names that the first five of them must have. Raises StoreUnavailable.
    """
    sums: dict[tuple[str, ...], list[int]] = {}
    total = [0] * len(COUNTERS)
    async for hour, totals in ledger.hours(int(since) // HOUR, -(-int(until) // HOUR) - 1):
        times = {"day": _iso(hour, "%Y-%m-%d"), "hour": _iso(hour, "%Y-%m-%dT%H:00Z")}
        for group, counts in totals.items():
            names = {**group._asdict(), **times}
            if any(names[dimension] != wanted for dimension, wanted in filters.items()):
                continue
            row = sums.setdefault(tuple(names[dimension] for dimension in by), [0] * len(COUNTERS))
            for place, count in enumerate(counts):
                row[place] += count
                total[place] += count
    rows = [{**dict(zip(by, names, strict=True)), **_shown(counts)} for names, counts in sums.items()]
    rows.sort(key=lambda row: (-(row["cost"] + row["saving"]), *(row[dimension] for dimension in by)))
    return rows, _shown(total)


def _shown(counts: Sequence[int]) -> Row:
    named = zip(COUNTERS, counts, strict=True)
    return {name: count / _NANO if name in _MONEY else count for name, count in named}


def _iso(hour: int, form: str) -> str:
    return datetime.fromtimestamp(hour * HOUR, UTC).strftime(form)
