"""What has become worse since the results that are saved."""

from benchmarks.harness.measurement import RATIO, Figure, Row


def regressions(saved: Figure, measured: Figure) -> list[str]:
    """A sentence for each ratio whose best round is worse than the worst one that is saved.

    Only ratios: whatever else a row counts is of the machine it was counted on. Only those with a target: of the
    others nobody has said which way is better. A row that is gone, or was not measured, counts as worse.
    """
    now = {row.what: row for row in measured.rows}
    found = []
    for row in saved.rows:
        if row.unit != RATIO or row.target is None:
            continue
        again = now.get(row.what)
        if again is None:
            found.append(f"{saved.figure}, {row.what}: not measured any more")
        elif _best(again) < _worst(row) if row.target.at == "least" else _best(again) > _worst(row):
            found.append(f"{saved.figure}, {row.what}: {_best(again):.3g} at best, {_worst(row):.3g} at worst before")
    return found


def _best(row: Row) -> float:
    return max(row.rounds) if row.target and row.target.at == "least" else min(row.rounds)


def _worst(row: Row) -> float:
    return min(row.rounds) if row.target and row.target.at == "least" else max(row.rounds)
