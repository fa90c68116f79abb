"""What one JSON document has beyond another, as a JSON Patch (RFC 6902)."""

from typing import Any

from gateway.surfaces.surface import Json


def difference(wanted: Any, given: Any, path: str = "") -> list[Json]:
    """The operations that make `wanted` of `given`. 1, 1.0 and true differ. Raises RecursionError for deep values."""
    if wanted is given or (type(wanted) is type(given) and not isinstance(wanted, dict | list) and wanted == given):
        return []
    if isinstance(wanted, dict) and isinstance(given, dict):
        return _object_difference(wanted, given, path)
    if isinstance(wanted, list) and isinstance(given, list):
        both = min(len(wanted), len(given))
        changed = [step for at in range(both) for step in difference(wanted[at], given[at], f"{path}/{at}")]
        added = [{"op": "add", "path": f"{path}/-", "value": value} for value in wanted[both:]]
        return (
            changed + added + [{"op": "remove", "path": f"{path}/{at}"} for at in range(len(given) - 1, both - 1, -1)]
        )
    return [{"op": "replace", "path": path, "value": wanted}]


def _object_difference(wanted: Json, given: Json, path: str) -> list[Json]:
    copied: list[Json] = []
    changed: list[Json] = []
    for name, value in wanted.items():
        at = f"{path}/{_escaped(name)}"
        if name in given:
            changed += difference(value, given[name], at)
        elif value and isinstance(value, str) and (same := next((n for n, v in given.items() if v == value), None)):
            # A long text under two names is not in the patch. It is copied before the first of them may change.
            copied.append({"op": "copy", "from": f"{path}/{_escaped(same)}", "path": at})
        else:
            changed.append({"op": "add", "path": at, "value": value})
    removed = [{"op": "remove", "path": f"{path}/{_escaped(name)}"} for name in given if name not in wanted]
    return copied + changed + removed


def patched(document: Json, patch: list[Any]) -> Json:
    """`document` with the operations of `difference` done; what they do not change is shared with it.

    Raises ValueError for a patch that is not one of this document.
    """
    try:
        for step in patch:
            value = _value_at(document, _names(step["from"])) if step["op"] == "copy" else step.get("value")
            document = _with(document, _names(step["path"]), step["op"], value)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not a JSON Patch of this document") from error
    return document


def _with(container: Any, names: list[str], operation: str, value: Any) -> Any:
    changed = container.copy()
    if isinstance(changed, list) and names == ["-"]:
        changed.append(value)
        return changed
    key = _key(changed, names[0])
    if len(names) > 1:
        changed[key] = _with(changed[key], names[1:], operation, value)
    elif operation == "remove":
        del changed[key]
    elif operation in ("add", "replace", "copy"):
        changed[key] = value
    else:
        raise ValueError(f"no operation {operation!r}")
    return changed


def _value_at(document: Any, names: list[str]) -> Any:
    for name in names:
        document = document[_key(document, name)]
    return document


def _names(pointer: str) -> list[str]:
    return [name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]


def _key(container: Any, name: str) -> str | int:
    return int(name) if isinstance(container, list) else name


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
