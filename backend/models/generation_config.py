"""What a model's authors recommend for sampling: ``generation_config.json``, as transformers writes it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from backend.errors import ModelError
from backend.models.json_file import read_json_object

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds for a request that leaves a field out. Without a recommendation nothing changes the model's own
    distribution, as in OpenAI's API.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """The recommendation in a model's directory; what is missing or null there keeps its default. Whether transformers
    itself would sample (``do_sample``) says nothing of a server, whose clients choose by the temperature.

    Raises:
        ModelError: a value is no number, or out of its range; names file and field.
    """
    file = directory / GENERATION_CONFIG
    if not file.is_file():
        return SamplingDefaults()
    values = read_json_object(file)
    found: dict[str, float] = {}
    for name in (field.name for field in fields(SamplingDefaults)):
        value, (low, high) = values.get(name), _RANGES[name]
        if value is None:
            continue
        kind = int if name == "top_k" else int | float
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            what = "an integer" if name == "top_k" else "a number"
            raise ModelError(f"{file}: {name} is {str(value)[:40]!r}, expected {what} from {low:g} to {high:g}")
        found[name] = value
    return SamplingDefaults(**found)  # type: ignore[arg-type]  # top_k is checked above
