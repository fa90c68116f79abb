"""What one JSON document has that another lacks, as a JSON Patch (RFC 6902): with it one comes back from the other."""

import copy
from typing import Any

from gateway.surfaces.surface import Json


def difference(wanted: Any, given: Any, path: str = "") -> list[Json]:
    """The operations that make `wanted` of `given`; none if they are equal. 1 and 1.0 differ.

    Raises RecursionError for deep values.
    """
    if isinstance(wanted, dict) and isinstance(given, dict):
        return _object_difference(wanted, given, path)
    if isinstance(wanted, list) and isinstance(given, list):
        both = min(len(wanted), len(given))
        changed = [step for at in range(both) for step in difference(wanted[at], given[at], f"{path}/{at}")]
        added = [{"op": "add", "path": f"{path}/-", "value": value} for value in wanted[both:]]
        removed = [{"op": "remove", "path": f"{path}/{at}"} for at in range(len(given) - 1, both - 1, -1)]
        return changed + added + removed
    if type(wanted) is type(given) and wanted == given:
        return []
    return [{"op": "replace", "path": path, "value": wanted}]


def _object_difference(wanted: Json, given: Json, path: str) -> list[Json]:
    copied: list[Json] = []
    changed: list[Json] = []
    for name, value in sorted(wanted.items()):
        at = f"{path}/{_escaped(name)}"
        if name in given:
            changed += difference(value, given[name], at)
        elif (same := _name_of(value, given)) is not None:
            # A long text under two names is there once. It is copied before its first name may change.
            copied.append({"op": "copy", "from": f"{path}/{_escaped(same)}", "path": at})
        else:
            changed.append({"op": "add", "path": at, "value": value})
    removed = [{"op": "remove", "path": f"{path}/{_escaped(name)}"} for name in sorted(given.keys() - wanted.keys())]
    return copied + changed + removed


def _name_of(value: Any, fields: Json) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    return min((name for name, known in fields.items() if known == value), default=None)


def patched(document: Any, patch: Any) -> Any:
    """A copy of `document` with the operations of `difference` done. Raises ValueError for anything else."""
    document = copy.deepcopy(document)
    try:
        for step in patch:
            _apply(document, step)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("not a JSON Patch of this document") from error
    return document


def _apply(document: Any, step: Json) -> None:
    operation = step["op"]
    container, name = _place(document, step["path"])
    if operation == "remove":
        if isinstance(container, list) and name != len(container) - 1:
            raise ValueError("only the last item of a list is removed")
        del container[name]
        return
    if operation == "copy":
        source, key = _place(document, step["from"])
        value = source[key]
        if not isinstance(value, str):
            raise ValueError("only texts are copied")
    elif operation in ("add", "replace"):
        value = copy.deepcopy(step["value"])
    else:
        raise ValueError(f"no operation {operation!r}")
    if name == "-" and isinstance(container, list):
        container.append(value)
    else:
        container[name] = value


def _place(document: Any, path: str) -> tuple[Any, Any]:
    """The object or list that a JSON pointer leads to, and the name or index in it."""
    root, *names = path.split("/")
    if root or not names:
        raise ValueError("a path is that of a member")
    *above, last = (name.replace("~1", "/").replace("~0", "~") for name in names)
    for name in above:
        document = document[_key(document, name)]
    return document, _key(document, last)


def _key(container: Any, name: str) -> str | int:
    if isinstance(container, list) and name != "-":
        return int(name)
    if not isinstance(container, dict | list):
        raise ValueError("a path goes through a value")
    return name


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
