"""The operation that reports costs, which needs the admin key."""

from gateway.api.openapi.operation import JSON, TEXT, Operation, Parameter
from gateway.api.operator.costs import CostReport
from gateway.costs.ledger import Group
from gateway.costs.report import DIMENSIONS

COST_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v1/costs"): Operation(
        tag="Costs",
        summary="What answers cost and what hits saved",
        description="Totals of the whole hours of a period, in US dollars.",
        query=(
            Parameter("by", f"What rows are by: some of {', '.join(DIMENSIONS)}, with commas; model by default."),
            Parameter("since", "Hours, days or weeks ago, or a date, such as 24h, 7d or 2026-11-01; 7d by default."),
            Parameter("until", "Likewise; now by default."),
            Parameter("format", "JSON by default.", {"enum": ["json", "csv"]}),
            *(Parameter(name, f"Only of this {name}.") for name in Group._fields),
        ),
        answer={JSON: CostReport, "text/csv": TEXT},
        errors=(400, 401, 403, 503),
        operator=True,
    ),
}
