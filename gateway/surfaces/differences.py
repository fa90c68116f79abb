"""What one JSON value says beyond another, as JSON: how an answer keeps what the other form has no name for.

A difference is `[value]` for another value, `[]` for none, and an object for changes within an object or a list, by
the name of a field or the number of an item: {"a": 1, "b": [1, 2]} becomes {"b": [1, 3], "c": 4} by
{"a": [], "b": {"1": [3]}, "c": [4]}. A new field with the text of another has the name of that one: a long text that a
server gives under two names is there once.
"""

from typing import Any


def difference(before: Any, after: Any) -> Any:
    """What makes `after` of `before`; None if they are the same."""
    if isinstance(before, list) and isinstance(after, list):
        return difference(_numbered(before), _numbered(after))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return None if type(before) is type(after) and before == after else [after]
    changes: dict[str, Any] = {name: [] for name in before if name not in after}
    for name, value in after.items():
        change = difference(before[name], value) if name in before else _same(before, value) or [value]
        if change is not None:
            changes[name] = change
    return changes or None


def _same(fields: dict[str, Any], value: Any) -> str | None:
    """The name of a field with this text."""
    if not isinstance(value, str) or not value:
        return None
    return next((name for name, text in fields.items() if name and text == value), None)


def patched(value: Any, change: Any) -> Any:
    """`value` with a difference in it. Raises ValueError for what is no difference of such a value."""
    if isinstance(change, list) and len(change) == 1:
        return change[0]
    if not isinstance(change, dict) or not isinstance(value, dict | list):
        raise ValueError("not a difference of this value")
    fields = _numbered(value) if isinstance(value, list) else dict(value)
    for name, inner in change.items():
        if inner == []:
            fields.pop(name, None)
        elif isinstance(inner, str) and isinstance(value, dict) and isinstance(value.get(inner), str):
            fields[name] = value[inner]
        else:
            fields[name] = patched(fields.get(name), inner)
    if isinstance(value, dict):
        return fields
    try:
        return [fields[str(number)] for number in range(len(fields))]
    except KeyError as error:
        raise ValueError("a list would have a gap") from error


def _numbered(items: list[Any]) -> dict[str, Any]:
    return {str(number): item for number, item in enumerate(items)}
