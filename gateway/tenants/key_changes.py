"""What an operator says of a key or a team, checked field by field."""

import re
import time
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.errors import InvalidRequest
from gateway.tenants.virtual_key import NO_LIMITS, CachePolicy, Count, Dollars, Limits

# Of keys, teams and namespaces: they stand in paths, tables, logs and keys of Redis.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$"
_NAME_RULE = "up to 64 letters, digits and . _ @ + -, a letter or digit first"
Name = Annotated[str, Meta(pattern=_NAME)]
OptionalName = Annotated[str, Meta(pattern=rf"^$|{_NAME}")]
Models = tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...]
Time = Annotated[float, Meta(gt=0, lt=1e11)] | None
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

T = TypeVar("T", bound=msgspec.Struct)


class _Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class NewKey(_Checked, frozen=True, kw_only=True):
    """`expires` is in Unix seconds; `namespace` is shared by keys that name the same one, "" is the key's own."""

    name: Name
    team: OptionalName = ""
    expires: Time = None
    models: Models = ()
    limits: Limits = NO_LIMITS
    namespace: OptionalName = ""
    cache: CachePolicy = "use"
    priority: Priority = 0


class LimitChanges(_Checked, frozen=True, kw_only=True):
    """What is left out stays; null is unlimited."""

    requests_per_minute: Count | UnsetType = UNSET
    tokens_per_minute: Count | UnsetType = UNSET
    concurrent_requests: Count | UnsetType = UNSET
    budget_per_day: Dollars | UnsetType = UNSET
    budget_per_month: Dollars | UnsetType = UNSET


class KeyChanges(_Checked, frozen=True, kw_only=True):
    """What is left out stays. A key keeps its name and team, under which its use is counted."""

    expires: Time | UnsetType = UNSET
    models: Models | UnsetType = UNSET
    limits: LimitChanges = LimitChanges()
    namespace: OptionalName | UnsetType = UNSET
    cache: CachePolicy | UnsetType = UNSET
    priority: Priority | UnsetType = UNSET


class Rotation(_Checked, frozen=True, kw_only=True):
    """`grace` is for how many seconds the present secret still holds, at most 90 days."""

    grace: Annotated[float, Meta(ge=0, le=90 * 86_400)] = 0.0


class TeamLimits(_Checked, frozen=True, kw_only=True):
    limits: Limits


def checked(fields: dict[str, Any], kind: type[T]) -> T:
    """What an operator sent. Raises InvalidRequest, which names the field and says what would be right."""
    try:
        value = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    expires = getattr(value, "expires", None)
    if isinstance(expires, float | int) and expires <= time.time():
        raise InvalidRequest("'expires' must be a time to come, in Unix seconds.", param="expires")
    return value


def checked_name(name: str) -> str:
    """The name of a team from a path. Raises InvalidRequest."""
    if not re.fullmatch(_NAME, name):
        raise InvalidRequest(f"'name' must be {_NAME_RULE}.", param="name")
    return name


def merged_limits(limits: Limits, changes: LimitChanges) -> Limits:
    given = {name: getattr(changes, name) for name in changes.__struct_fields__}
    return msgspec.structs.replace(limits, **{name: value for name, value in given.items() if value is not UNSET})


def _refusal(said: str) -> InvalidRequest:
    """msgspec says what is wrong, then ` - at `, and where: `$.limits.budget_per_day`."""
    reason, _, place = said.partition(" - at ")
    path = place.strip("`").removeprefix("$").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", reason)
    missing = re.search(r"missing required field `(.*)`", reason)
    if found := unknown or missing:
        path = ".".join(filter(None, (path, found[1])))
        return InvalidRequest(f"'{path}' is {'no field here' if unknown else 'missing'}.", param=path)
    if "matching regex" in reason:
        reason = f"Expected {_NAME_RULE}"
    return InvalidRequest(f"'{path or 'body'}': {reason[:1].lower()}{reason[1:].replace('`', '')}.", param=path or None)
