"""Reads and checks the tensors of one linear layer in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.quantized_weights.quantized_linear import MAX_SCALE

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """Tensors whose names begin with a module's, such as ``model.layers.0.self_attn.q_proj``.

    Args:
        out_features: of the layer by the model's config.
        in_features: as ``out_features``.
    """

    store: TensorStore
    name: str
    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.out_features, self.in_features

    def has(self, part: str) -> bool:
        """Whether there is a tensor such as ``weight``."""
        return self.store.has(f"{self.name}.{part}")

    @property
    def is_plain(self) -> bool:
        """Whether the weight is stored as floats without a scale."""
        return self.has("weight") and self.store.is_float(f"{self.name}.weight")

    def raw(self, part: str) -> torch.Tensor:
        """A tensor of any shape and dtype.

        Raises:
            ModelError: there is none, or its file cannot be read.
        """
        name = f"{self.name}.{part}"
        try:
            return self.store.raw(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.store.path(name)}: tensor {name} cannot be read ({error})") from error

    def take(self, part: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> torch.Tensor:
        """A tensor of one of the given dtypes and shapes.

        Raises:
            ModelError: it is missing, or of another shape or dtype.
        """
        tensor = self.raw(part)
        if tensor.dtype not in dtypes:
            raise self.error(part, f"is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
        if tuple(tensor.shape) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(part, f"has shape {list(tensor.shape)}, expected {expected}")
        return tensor

    def scales(self, part: str, *shapes: tuple[int, ...], most: float = MAX_SCALE) -> torch.Tensor:
        """Finite floats of one of the shapes.

        Args:
            most: their largest magnitude.

        Raises:
            ModelError: as `take`; or one is not finite, or beyond ``most``.
        """
        tensor = self.take(part, FLOATS, *shapes)
        if not bool(torch.isfinite(tensor).all()):
            raise self.error(part, "holds a value that is not a finite number")
        if bool((tensor.float().abs() > most).any()):
            raise self.error(part, f"holds a value further from zero than {most:g}")
        return tensor

    def error(self, part: str, problem: str) -> ModelError:
        """The error for a tensor; names its file."""
        name = f"{self.name}.{part}"
        place: Path = self.store.path(name) if self.store.has(name) else self.store.directory
        return ModelError(f"{place}: tensor {name} {problem}")
