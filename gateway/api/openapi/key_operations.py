"""The operations of virtual keys, teams and budgets, which need the admin key."""

from typing import Any

from gateway.api.openapi.operation import BODY_ERRORS, JSON, Operation
from gateway.api.operator import budgets, keys
from gateway.tenants.key_changes import KeyChanges, NewKey, Rotation, TeamLimits


def _operation(summary: str, answer: Any, *errors: int, **others: Any) -> Operation:
    return Operation(tag="Keys", summary=summary, answer={JSON: answer}, errors=(*errors, 503), operator=True, **others)


_BY_NAME = {"description": "`id` is the key's id, or its name while it is not revoked."}

KEY_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/keys"): _operation(
        "Make a key",
        keys.KeyWithSecret,
        *BODY_ERRORS,
        description="The secret is in this answer only.",
        body={JSON: NewKey},
    ),
    ("GET", "/v1/keys"): _operation("All keys, revoked ones too", keys.KeyList),
    ("GET", "/v1/keys/{id}"): _operation("One key", keys.Key, 404, **_BY_NAME),
    ("PATCH", "/v1/keys/{id}"): _operation(
        "Change the limits and rules of a key", keys.Key, *BODY_ERRORS, 404, body={JSON: KeyChanges}, **_BY_NAME
    ),
    ("DELETE", "/v1/keys/{id}"): _operation("Revoke a key", keys.Key, 400, 404, **_BY_NAME),
    ("POST", "/v1/keys/{id}/rotate"): _operation(
        "Give a key a new secret", keys.KeyWithSecret, *BODY_ERRORS, 404, body={JSON: Rotation}, **_BY_NAME
    ),
    ("GET", "/v1/teams"): _operation("All teams", keys.TeamList),
    ("GET", "/v1/teams/{name}"): _operation("One team", keys.TeamObject, 404),
    ("PUT", "/v1/teams/{name}"): _operation(
        "Make a team, or replace its limits", keys.TeamObject, *BODY_ERRORS, body={JSON: TeamLimits}
    ),
    ("GET", "/v1/budgets"): _operation(
        "Budgets of keys and teams, with what is spent of them today and this month (UTC)", budgets.BudgetList, 400
    ),
}
