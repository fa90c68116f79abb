"""Lets torchvision be imported beside a torch for CPUs.

Its wheel's operators are linked to CUDA and do not load there. It asks for their names when it registers meta kernels,
so a schema of each is enough: nobody here calls them.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]


def define() -> None:
    """To be called once, before anything imports torchvision."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    text = Path(spec.origin).with_name("_meta_registrations.py").read_text("utf-8")
    for name in sorted(set(re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', text))):
        _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
