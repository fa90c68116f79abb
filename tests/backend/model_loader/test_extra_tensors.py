"""A checkpoint with tensors that its config.json does not describe is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.checkpoints.quantized.registry import checkpoint_reader, quantization_config
from backend.checkpoints.quantized.writer import write_checkpoint
from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.model_loader.linears import linears
from backend.model_loader.weights import ModelWeights, dense, load_weights, read_config
from backend.models.json_file import read_json_object
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.quantized_linear import Scheme
from tests.backend.checkpoints.quantized.test_public_packages import DATA, SCHEMES, SHAPES
from tests.backend.random_models import KINDS, Kind, save

QUERY = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
PLAIN = Kind("Llama", SIZES)
TIED = Kind("Llama", {**SIZES, "tie_word_embeddings": True})


def load(directory: Path) -> ModelWeights:
    return load_weights(directory, read_config(directory))


def add(directory: Path, *names: str, **parts: torch.Tensor) -> None:
    """Puts tensors of ones, and tensors of `UP`, into another of the model's files."""
    tensors = {name: torch.ones(3) for name in names} | {f"{UP}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, directory / "more.safetensors")
    whole = directory / "model.safetensors"
    if whole.is_file():
        whole.rename(directory / "first.safetensors")


def write_quantised(directory: Path, scheme: Scheme) -> Path:
    """A small model with all its layers in a scheme."""
    save(PLAIN, directory / "plain")
    layers = {name: scheme.pack(dense(weight)) for name, weight in linears(load(directory / "plain")).items()}
    write_checkpoint(directory / "packed", directory / "plain", layers)
    return directory / "packed"


def write_gptq(directory: Path) -> Path:
    """A small model with all its layers as GPTQ's tools write them, every code that of zero."""
    save(PLAIN, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in linears(load(directory)):
        if name == "lm_head":
            continue
        out, inputs = tensors.pop(f"{name}.weight").shape
        tensors[f"{name}.qweight"] = torch.full((inputs // 8, out), -0x77777778, dtype=torch.int32)
        tensors[f"{name}.qzeros"] = torch.full((inputs // 32, out // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{name}.scales"] = torch.ones(inputs // 32, out, dtype=torch.float16)
        tensors[f"{name}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // 32
        tensors[f"{name}.bias"] = torch.zeros(out, dtype=torch.float16)
    save_file(tensors, directory / "model.safetensors")
    change_config(directory, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True})
    return directory


def change_config(directory: Path, **fields: Any) -> None:
    values = read_json_object(directory / "config.json") | fields
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{QUERY}.bias", "expected no bias there"),
        (f"{QUERY}.foo", "expected no such tensor"),
        (f"{QUERY}.weight_scale", "expected no such tensor"),
        ("model.layers.0.self_attn.q_norm.weight", "expected no such tensor"),
        ("model.layers.0.mlp.experts.0.up_proj.weight", "expected no such tensor"),
        ("model.layers.0.post_feedforward_layernorm.weight", "expected no such tensor"),
        ("model.layers.9.mlp.up_proj.weight", "expected layers 0 to 3, as num_hidden_layers says"),
        ("model.layers.a.weight", "expected no such tensor"),
        ("model.norm.bias", "expected no bias there"),
        ("model.embed_positions.weight", "expected no such tensor"),
        ("lm_head.bias", "expected no bias there"),
    ],
)
def test_a_tensor_that_the_model_has_no_place_for_is_named(name: str, expected: str, tmp_path: Path) -> None:
    """A tensor that the model has no place for is refused with its file, in one line."""
    save(PLAIN, tmp_path)
    add(tmp_path, name)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    file = tmp_path / "more.safetensors"
    assert str(caught.value) == f"{file}: tensor {name} has no place in this llama decoder, {expected}"


def test_layers_beyond_the_config_are_refused(tmp_path: Path) -> None:
    """Layers beyond the config's number are refused with the first tensor and the number of the others."""
    save(PLAIN, tmp_path)
    change_config(tmp_path, num_hidden_layers=3)
    message = r"model\.layers\.3\.input_layernorm\.weight \(and 8 others\) has no place .* expected layers 0 to 2"
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_an_expert_beyond_the_config_is_refused(tmp_path: Path) -> None:
    """An expert beyond the config's number is refused."""
    save(KINDS["qwen3-moe"], tmp_path)
    load(tmp_path)
    add(tmp_path, "model.layers.0.mlp.experts.6.up_proj.weight")
    with pytest.raises(ModelError, match=r"experts\.6\.up_proj\.weight has no place in this qwen3_moe decoder"):
        load(tmp_path)


def test_buffers_and_other_model_parts_are_ignored(tmp_path: Path) -> None:
    """Computed buffers and parts beside the decoder are ignored."""
    save(PLAIN, tmp_path)
    add(
        tmp_path,
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
        "model.layers.0.self_attn.q_zero_point",
        "model.layers.0.self_attn.masked_bias",
        "model.layers.0.self_attn.bias",
        "model.rotary_emb.inv_freq",
        "vision_tower.layers.0.weight",
        "multi_modal_projector.weight",
        "layers.0.attention.wq.weight",
    )
    load(tmp_path)


def test_a_tied_model_may_store_its_head(tmp_path: Path) -> None:
    """A tied model ignores a stored head weight and refuses any other tensor of a head."""
    save(TIED, tmp_path)
    add(tmp_path, "lm_head.weight")
    weights = load(tmp_path)
    assert weights.head is weights.embedding
    add(tmp_path, "lm_head.qweight")
    with pytest.raises(ModelError, match=r"lm_head\.qweight has no place in this llama decoder"):
        load(tmp_path)


@pytest.mark.parametrize("place", ["language_model.model.", "model.language_model."])
def test_vision_parts_are_ignored_beside_a_multimodal_decoder(place: str, tmp_path: Path) -> None:
    """A multimodal model's other parts are ignored, and an unknown tensor of its decoder is refused."""
    save(KINDS["gemma3"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.replace("model.", place, 1): tensors[name] for name in tensors}, tmp_path / "model.safetensors")
    add(tmp_path, "model.vision_tower.layers.9.bias", "vision_tower.layers.9.bias", "model.multi_modal_projector.bias")
    load(tmp_path)
    add(tmp_path, f"{place}layers.9.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=f"tensor {place}layers.9.mlp.up_proj.weight has no place in this gemma3_text"):
        load(tmp_path)


@pytest.mark.parametrize("scheme", [IntScheme(4, 32), IntScheme(8), Fp8Scheme()], ids=lambda scheme: scheme.name)
def test_scales_of_activations_and_kv_are_ignored(scheme: Scheme, tmp_path: Path) -> None:
    """Scales of activations and KV blocks are ignored, and other unknown tensors of a layer are refused."""
    directory = write_quantised(tmp_path, scheme)
    attention = "model.layers.0.self_attn"
    names = (f"{UP}.input_scale", f"{UP}.input_zero_point", f"{attention}.k_proj.output_scale", f"{attention}.k_scale")
    add(directory, *names, f"{attention}.v_scale")
    load(directory)
    for part in ("scales", "weight_foo"):
        add(directory, f"{UP}.{part}")
        with pytest.raises(ModelError, match=rf"up_proj\.{part} has no place"):
            load(directory)


def test_a_float_weight_beside_a_quantised_one_is_refused(tmp_path: Path) -> None:
    """A float weight beside a quantised one of the same layer is refused."""
    directory = write_quantised(tmp_path, IntScheme(4, 32))
    add(directory, f"{UP}.weight")
    with pytest.raises(ModelError, match=r"up_proj\.weight has no place"):
        load(directory)


def test_a_bias_of_zeros_is_ignored(tmp_path: Path) -> None:
    """A bias of zeros, which GPTQ's tools write for every layer, is ignored; any other unexpected bias is refused."""
    directory = write_gptq(tmp_path)
    load(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[f"{UP}.bias"][1] = 0.5
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .*up_proj\.bias has no place"):
        load(directory)


@pytest.mark.parametrize("folder", sorted(SCHEMES))
def test_every_tensor_of_a_package_is_read(folder: str) -> None:
    """Every tensor that a public package writes for a layer is read."""
    values = quantization_config(read_json_object(DATA / folder / "config.json"))
    assert values is not None
    store = TensorStore(DATA / folder)
    reader = checkpoint_reader(values, store, folder)
    for name, shape in SHAPES.items():
        if reader.linear(name, *shape) is None:
            store.take(f"{name}.weight", shape)
    assert store.unread() == []


ORDERS: Mapping[str, torch.Tensor] = {
    "in order": torch.arange(64, dtype=torch.int32) // 32,
    "in turn": torch.arange(64, dtype=torch.int32) % 2,
}


@pytest.mark.parametrize(
    ("actorder", "order", "is_read"),
    [
        (None, "in order", True),
        (None, "in turn", False),
        ("weight", "in turn", False),
        ("static", "in order", True),
        ("group", "in turn", True),
        ("GROUP", "in turn", True),
        ("dynamic", "in turn", True),
        (True, "in turn", True),
        (False, "in turn", False),
    ],
)
def test_an_input_order_is_read_only_if_the_config_declares_it(
    actorder: object, order: str, is_read: bool, tmp_path: Path
) -> None:
    """A group index that is not in order is read only if the config declares act-order."""
    directory = write_quantised(tmp_path, IntScheme(4, 32))
    values = read_json_object(directory / "config.json")["quantization_config"]
    values["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    change_config(directory, quantization_config=values)
    add(directory, weight_g_idx=ORDERS[order])
    if is_read:
        load(directory)
        return
    with pytest.raises(ModelError) as caught:
        load(directory)
    said = f"config_groups.group_0.weights: actorder is {actorder!r}"
    assert str(caught.value).startswith(f"{directory / 'more.safetensors'}: tensor {UP}.weight_g_idx")
    assert str(caught.value).endswith(f"{said}, expected 'group', or groups of inputs side by side")


def test_symmetric_zero_points_must_be_zero(tmp_path: Path) -> None:
    """Zero points of a symmetric group are accepted if they are zero."""
    integers, floats = write_quantised(tmp_path / "a", IntScheme(8)), write_quantised(tmp_path / "b", Fp8Scheme())
    for directory, dtype in ((integers, torch.int8), (integers, torch.int64), (floats, torch.float8_e4m3fn)):
        zeros = torch.zeros(128, 1)
        add(directory, weight_zero_point=zeros.to(dtype))
        load(directory)
        zeros[5] = 1
        add(directory, weight_zero_point=zeros.to(dtype))
        with pytest.raises(ModelError, match=r"weight_zero_point holds .*, though config\.json says symmetric"):
            load(directory)


def test_packed_symmetric_zero_points_must_be_the_middle_code(tmp_path: Path) -> None:
    """Packed zero points of a symmetric group are accepted if each is the middle code."""
    directory = write_quantised(tmp_path, IntScheme(4, 32))
    middle = torch.full((128 // 8, 2), -0x77777778, dtype=torch.int32)
    add(directory, weight_zero_point=middle)
    load(directory)
    add(directory, weight_zero_point=middle + 1)
    with pytest.raises(ModelError, match=r"weight_zero_point holds .*, though config\.json says symmetric"):
        load(directory)
