"""Writes a model whose linear layers are quantised, so that vLLM and transformers load it too."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from backend.checkpoints.quantized.bitsandbytes import nf4_config, nf4_tensors
from backend.checkpoints.quantized.compressed_tensors import compressed, compressed_config
from backend.checkpoints.shards import Shards
from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.models.json_file import read_json_object
from backend.quantized_weights.float_scheme import FloatLinear
from backend.quantized_weights.int_scheme import IntLinear
from backend.quantized_weights.nf4_scheme import Nf4Linear
from backend.quantized_weights.quantized_linear import CannotQuantize, QuantizedLinear

# Files of a model's directory that are neither weights nor rewritten.
_COPIED_FILES = ("*.jinja", "*.model", "*.txt", "LICENSE*", "*.json")
_REPLACED_FILES = ("config.json", "model.safetensors.index.json")
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"


def write_checkpoint(
    directory: Path,
    source: Path,
    layers: Mapping[str, QuantizedLinear],
    tensors: Mapping[str, torch.Tensor] | None = None,
    shard_bytes: int = 2**32,
) -> None:
    """Writes a Hugging Face directory: config, weights, and all that ``source`` has for its tokenizer.

    Integers and eight-bit floats are written in the format of compressed-tensors, NF4 in that of bitsandbytes, sixteen
    bits as they are; all of them bit for bit. The directory appears when it is complete, by a rename.

    compressed-tensors reads a stored act-order (`IntLinear.order`) up to its version 0.18, and refuses it since.

    Args:
        directory: the target; it may exist if it is empty.
        source: the directory of the unquantised model.
        layers: by module name, such as ``model.layers.0.self_attn.q_proj``; ``lm_head`` too, which unties it from
            the embedding. Each is read once, in the order of the source's tensors.
        tensors: replacements of other tensors of the source, by full name such as ``model.norm.weight``.
        shard_bytes: approximate size of a file.

    Raises:
        ModelError: the source has no such module, or one of another shape; two formats would be needed, or none
            supports a scheme; the directory is not empty or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory}: is there already, expected a new or an empty directory")
    store = TensorStore(source)
    config = read_json_object(source / "config.json")
    _check(store, config, source, layers, tensors or {})
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # A rename is atomic: the directory either holds everything or is not there.
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise ModelError(f"{directory}: cannot be written ({error})") from error
    try:
        _write(work, store, config, layers, tensors or {}, shard_bytes)
        _take_over(source, work)
        work.chmod(0o755)
        work.rename(directory)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check(
    store: TensorStore,
    config: dict[str, Any],
    source: Path,
    layers: Mapping[str, QuantizedLinear],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Raises ModelError if names do not fit the source."""
    if config.get("quantization_config"):
        raise ModelError(f"{source}: is quantised already, expected plain weights")
    for name in layers:
        if not store.has(f"{name}.weight") and not (name == _HEAD and config.get("tie_word_embeddings")):
            raise ModelError(f"{source}: there is no {name}.weight to have been quantised")
    for name in tensors:
        if not store.has(name):
            raise ModelError(f"{source}: there is no tensor {name} to be replaced")


def _write(
    work: Path,
    store: TensorStore,
    config: dict[str, Any],
    layers: Mapping[str, QuantizedLinear],
    tensors: Mapping[str, torch.Tensor],
    shard_bytes: int,
) -> None:
    """Weights and config.json."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    written, shards = QuantizedModules(str(dtype)), Shards(work, shard_bytes)
    for name in store.names():
        module, stored_name = name.removesuffix(".weight"), store.stored_name(name)
        if module == name or module not in layers:
            tensor = tensors[name] if name in tensors else store.raw(name)
            shards.add(stored_name, tensor)
            if module not in (name, _EMBEDDING) and tensor.ndim == 2:
                written.left_alone.append(stored_name.removesuffix(".weight"))
            continue
        shape, stored_module = tuple(store.raw(name).shape), stored_name.removesuffix(".weight")
        for part, tensor in written.parts(stored_module, _fitting(module, layers[module], shape)).items():
            shards.add(f"{stored_module}.{part}", tensor)
    if not store.has(f"{_HEAD}.weight"):
        if _HEAD in layers:
            shape = tuple(store.raw(f"{_EMBEDDING}.weight").shape)
            for part, tensor in written.parts(_HEAD, _fitting(_HEAD, layers[_HEAD], shape)).items():
                shards.add(f"{_HEAD}.{part}", tensor)
            config = {**config, "tie_word_embeddings": False}
        else:
            written.left_alone.append(_HEAD)  # a module of its own, even if it is tied
    shards.close()
    (work / "config.json").write_text(json.dumps({**config, **written.config()}, indent=2) + "\n", encoding="utf-8")


def _fitting(module: str, linear: QuantizedLinear, shape: tuple[int, ...]) -> QuantizedLinear:
    """The weight, if it can replace one of this shape. Raises CannotQuantize otherwise."""
    if linear.shape != shape:
        raise CannotQuantize(f"{module} is {list(linear.shape)}, and {list(shape)} in the source")
    if isinstance(linear, IntLinear) and linear.minima is not None:
        raise CannotQuantize(f"{module}: no public format holds {linear.scheme.name}, expected a zero or none")
    return linear


def _take_over(source: Path, work: Path) -> None:
    for pattern in _COPIED_FILES:
        for path in source.glob(pattern):
            if path.is_file() and path.name not in _REPLACED_FILES:
                shutil.copyfile(path, work / path.name)


class QuantizedModules:
    """Collects weights, each in the format that supports its scheme.

    Args:
        dtype: of the model's activations, as its config names it.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.left_alone: list[str] = []
        """Names of linear layers that are plain; the writer adds each."""
        self._groups: dict[str, tuple[dict[str, Any], list[str]]] = {}  # of compressed-tensors, by their JSON
        self._nf4: list[bool] = []  # of weights in NF4: whether their scales have scales

    def parts(self, module: str, linear: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The tensors of a module, by the suffix of names. Raises CannotQuantize, which names it."""
        if isinstance(linear, FloatLinear):
            self.left_alone.append(module)
            return {"weight": linear.weight}
        if isinstance(linear, Nf4Linear):
            self._nf4.append(linear.scheme.double)
            parts = nf4_tensors(linear, self._dtype)
        else:
            try:
                of_module = compressed(linear)
            except CannotQuantize as error:
                raise CannotQuantize(f"{module}: {error}") from error
            self._groups.setdefault(json.dumps(of_module.group), (of_module.group, []))[1].append(module)
            parts = of_module.tensors
        if self._nf4 and self._groups:
            raise CannotQuantize(f"{module}: {linear.scheme.name} needs another format than the weights before it")
        return parts

    def config(self) -> dict[str, Any]:
        """The field of config.json; empty if all is plain."""
        if self._nf4:
            return {"quantization_config": nf4_config(any(self._nf4), self._dtype, self.left_alone)}
        if self._groups:
            return {"quantization_config": compressed_config(list(self._groups.values()), self.left_alone)}
        return {}
