"""Reads the loss that ``keepgate quantize`` measured, from its report beside the weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from backend.errors import ModelError
from backend.model_loader.source import REPORT_FILE
from backend.quantization.methods.report import Divergence


class _Report(msgspec.Struct):
    """The fields that are read."""

    divergence: Divergence | None = None


def stated_loss(directory: Path) -> Divergence | None:
    """The measured divergence; None: there is no report, or none in the report.

    Raises:
        ModelError: the report is invalid.
    """
    path = directory / REPORT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Report).divergence
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: expected a report of `keepgate quantize`, or no such file ({error})") from error
