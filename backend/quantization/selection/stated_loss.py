"""What ``keepgate quantize`` measured when it made a model, as its report beside the weights says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from backend.errors import ModelError
from backend.model_loader.source import REPORT_FILE
from backend.quantization.methods.report import Divergence


class _Report(msgspec.Struct):
    """The part of it that is read."""

    divergence: Divergence | None = None


def stated_loss(directory: Path) -> Divergence | None:
    """None: there is no report, or it is of something else, or nothing was run when it was made.

    Raises:
        ModelError: the report is none.
    """
    path = directory / REPORT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Report).divergence
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: expected a report of `keepgate quantize`, or no such file ({error})") from error
