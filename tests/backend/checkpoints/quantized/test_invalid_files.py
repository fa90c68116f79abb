"""An invalid checkpoint is refused in one line with the tensor, its file, and what is expected."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from backend.errors import ModelError
from backend.models.json_file import read_json_object
from tests.backend.checkpoints.quantized.directories import read_linear
from tests.backend.checkpoints.quantized.test_public_packages import DATA, KEY, SCHEMES, SHAPES

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def changed(directory: Path, folder: str, change: Change | None = None, **fields: Any) -> Path:
    """A copy of a package's checkpoint with changes to `KEY`'s tensors, named by their ends, and to config fields."""
    shutil.copytree(DATA / folder, directory)
    tensors = load_file(directory / "model.safetensors")
    ours = {name.removeprefix(f"{KEY}."): tensors.pop(name) for name in list(tensors) if name.startswith(KEY)}
    if change is not None:
        change(ours)
    tensors |= {f"{KEY}.{part}": tensor.clone(memory_format=torch.contiguous_format) for part, tensor in ours.items()}
    save_file(tensors, directory / "model.safetensors")
    config = read_json_object(directory / "config.json")
    config["quantization_config"] |= fields
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def drop(part: str) -> Change:
    return lambda tensors: tensors.pop(part)


def put(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({part: make(tensors[part])})


def with_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.clone().flatten()
        flat[0] = value
        return flat.view(tensor.shape)

    return make


GPTQ, ORDER, AWQ = "gptqmodel-gptq", "gptqmodel-gptq-order", "autoawq-gemm"
INT4, INT8, FP8, BLOCKS = (f"llmcompressor-{name}" for name in ("int4-asymmetric", "w8a8", "fp8", "fp8-block"))
NF4, NF4_DOUBLE, LLM_INT8 = (f"bitsandbytes-{name}" for name in ("nf4", "nf4-double", "int8"))
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("folder", "change", "message"),
    [
        (GPTQ, drop("qweight"), "k_proj.qweight is missing"),
        (GPTQ, drop("scales"), "k_proj.scales is missing"),
        (GPTQ, put("qweight", lambda t: t[:-1]), r"k_proj.qweight has shape \[7, 32\], expected \[8, 32\]"),
        (GPTQ, put("qweight", torch.Tensor.float), "k_proj.qweight is torch.float32, expected torch.int32"),
        (GPTQ, put("scales", lambda t: t.repeat(2, 1)), r"k_proj.scales has shape \[4, 32\], expected \[2, 32\]"),
        (GPTQ, put("scales", with_first(float("nan"))), "k_proj.scales holds a value that is not a finite number"),
        (GPTQ, put("qzeros", with_first(0)), "k_proj.qzeros holds other zeros than 8, though config.json says sym"),
        (ORDER, put("g_idx", with_first(2)), "k_proj.g_idx names group 2, expected 0 to 1"),
        (ORDER, put("g_idx", with_first(-1)), "k_proj.g_idx names group -1, expected 0 to 1"),
        (ORDER, put("g_idx", torch.zeros_like), "k_proj.g_idx gives group 0 64 inputs, expected 32"),
        (ORDER, drop("g_idx"), "k_proj.g_idx is missing, though config.json says desc_act"),
        (ORDER, put("g_idx", lambda t: t[1:]), r"k_proj.g_idx has shape \[63\], expected \[64\]"),
        (GPTQ, put("scales", lambda t: t.float() * 1e30), "k_proj.scales holds a value further from zero than 1.8"),
        (GPTQ, put("scales", lambda t: t.float() * 1e-8), "k_proj has only scales that half floats take for nothing"),
        (AWQ, put("qweight", lambda t: t.T), r"k_proj.qweight has shape \[4, 64\], expected \[64, 4\]"),
        (AWQ, drop("qzeros"), "k_proj.qzeros is missing"),
        (AWQ, put("scales", with_first(float("inf"))), "k_proj.scales holds a value that is not a finite number"),
        (INT4, drop("weight_zero_point"), "k_proj.weight_zero_point is missing"),
        (INT4, put("weight_shape", with_first(31)), r"k_proj.weight_shape says \[31, 64\], expected \[32, 64\]"),
        (INT4, put("weight_scale", torch.Tensor.int), "k_proj.weight_scale is torch.int32, expected torch.float16 or"),
        (INT4, put("weight_scale", lambda t: t.float() * 1e9), "k_proj has a scale beyond the range of half floats"),
        (INT8, put("weight", torch.Tensor.float), "k_proj.weight is torch.float32, expected torch.int8"),
        (INT8, lambda t: (t.pop("weight_scale"), t.update(weight=t["weight"].half())), "k_proj.weight is plain, and"),
        (FP8, drop("weight_scale"), "k_proj.weight_scale is missing"),
        (FP8, put("weight", lambda t: t.view(torch.uint8).fill_(127).view(t.dtype)), "a value that is not a number"),
        (FP8, put("weight_scale", lambda t: t[:7]), r"k_proj.weight_scale has shape \[7, 1\], expected \[32, 1\] or"),
        (FP8, put("weight_scale", lambda t: t[0, 0]), r"k_proj.weight_scale has shape \[\], expected \[32, 1\] or"),
        (FP8, put("weight_scale", lambda t: t[:1]), r"k_proj.weight_scale has shape \[1, 1\], expected \[32, 1\] or"),
        (BLOCKS, put("weight_scale", lambda t: t[:, :1]), r"k_proj.weight_scale has shape \[1, 1\], expected \[1, 2\]"),
        (NF4, drop(STATE), "nf4 is missing"),
        (NF4, put(STATE, lambda t: t[:-1]), "nf4 holds no JSON"),
        (NF4, put("weight.absmax", lambda t: t[1:]), r"k_proj.weight.absmax has shape \[31\], expected \[32\]"),
        (NF4, put("weight.quant_map", with_first(-2)), "k_proj.weight.quant_map holds other levels than those of NF4"),
        (NF4_DOUBLE, drop("weight.nested_absmax"), "k_proj.weight.nested_absmax is missing"),
        (LLM_INT8, drop("SCB"), "k_proj.SCB is missing"),
        (LLM_INT8, put("weight_format", lambda t: t + 1), "k_proj.weight_format is 1, expected 0: row after row"),
        (LLM_INT8, put("SCB", with_first(float("nan"))), "k_proj.SCB holds a value that is not a finite number"),
    ],
)
def test_an_invalid_tensor_is_named(folder: str, change: Change, message: str, tmp_path: Path) -> None:
    """An invalid or missing tensor is named with its file or directory, in one line."""
    directory = changed(tmp_path / "model", folder, change)
    with pytest.raises(ModelError, match=message) as caught:
        read_linear(directory, KEY, *SHAPES[KEY])
    assert str(caught.value).startswith(f"{directory}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("folder", "fields", "message"),
    [
        (GPTQ, {"quant_method": "hqq"}, "quant_method is 'hqq', expected one of gptq, awq, compressed-tensors, fp8"),
        (GPTQ, {"bits": 3}, "bits is 3, expected 4 or 8"),
        (GPTQ, {"bits": 8}, r"k_proj.qweight has shape \[8, 32\], expected \[16, 32\]"),
        (GPTQ, {"group_size": 0}, "group_size is 0, expected a positive integer, or -1"),
        (GPTQ, {"group_size": 48}, "k_proj: int4-g48 needs inputs in multiples of 48, and these are 64"),
        (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected gptq or gptq_v2"),
        (GPTQ, {"dynamic": {"+:(": {}}}, "dynamic is .*, expected regular expressions"),
        (GPTQ, {"dynamic": {"-:.*k_proj": {}}}, "k_proj.qweight is of a module that .* leaves alone in dynamic"),
        (AWQ, {"bits": 8}, "bits is 8, expected 4"),
        (AWQ, {"version": "gemv"}, "version is 'gemv', expected gemm"),
        (INT4, {"config_groups": {}}, "config_groups is {}, expected an object of objects"),
        (INT4, {"ignore": ["Linear"]}, "k_proj.weight.* names no group for it"),
        (
            INT4,
            {"transform_config": {"R1": {"type": "hadamard"}}},
            "transform_config .* absent: rows must be",
        ),
        (
            GPTQ,
            {"rotation": "hadamard"},
            "rotation is 'hadamard', expected absent: rows must be",
        ),
        (INT4, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config .* weights must not be sparse"),
        (BLOCKS, {"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size .* two positive integers"),
        (NF4, {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4', expected nf4"),
        (NF4, {"load_in_8bit": True}, "load_in_4bit is True, expected that either it or load_in_8bit is true"),
    ],
)
def test_an_unsupported_config_is_refused(folder: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A config that is not supported, or does not match the tensors, is refused by its field or the tensor."""
    directory = changed(tmp_path / "model", folder, **fields)
    with pytest.raises(ModelError, match=message):
        read_linear(directory, KEY, *SHAPES[KEY])


@pytest.mark.parametrize(
    ("folder", "weights", "message"),
    [
        (INT4, {"num_bits": 3}, "group_0.weights: num_bits is 3, expected 4 or 8"),
        (INT4, {"type": "fp"}, "group_0.weights: type is 'fp', expected 'int' or 'float'"),
        (INT4, {"strategy": "block"}, "group_0.weights: strategy is 'block', expected one of tensor, channel, group"),
        (INT4, {"strategy": "channel"}, r"k_proj.weight_scale has shape \[32, 2\], expected \[32, 1\] or \[32\]"),
        (BLOCKS, {"block_structure": [32]}, "block_structure is .*, expected two positive integers"),
        (FP8, {"num_bits": 4}, "num_bits is 4, expected 8 for floats"),
        (FP8, {"strategy": "tensor"}, r"k_proj.weight_scale has shape \[32, 1\], expected \[\] or \[1\] or \[1, 1\]"),
    ],
)
def test_an_unsupported_config_group_is_refused(
    folder: str, weights: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Each group of a compressed-tensors config is checked by itself."""
    config = read_json_object(DATA / folder / "config.json")["quantization_config"]
    config["config_groups"]["group_0"]["weights"] |= weights
    directory = changed(tmp_path / "model", folder, config_groups=config["config_groups"])
    with pytest.raises(ModelError, match=message):
        read_linear(directory, KEY, *SHAPES[KEY])


def test_awq_outputs_must_fill_words(tmp_path: Path) -> None:
    """An AWQ weight whose outputs are no multiple of 8 is refused."""
    with pytest.raises(ModelError, match=r"k_proj\.qweight cannot be of 30 outputs, expected a multiple of 8"):
        read_linear(changed(tmp_path / "model", AWQ), KEY, 30, 64)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip


def read_or_refuse(directory: Path) -> None:
    """Reads a weight of the right shape with finite values, or gets a ModelError."""
    try:
        linear = read_linear(directory, KEY, *SHAPES[KEY])
    except ModelError:
        return
    assert linear is None or (linear.shape == SHAPES[KEY] and bool(torch.isfinite(linear.unpack()).all()))


@settings(max_examples=150)
@given(folder=st.sampled_from(sorted(SCHEMES)), data=st.data())
def test_any_change_of_a_tensor_is_read_or_refused(folder: str, data: st.DataObject) -> None:
    """A tensor with any bits, shape or dtype gives a finite weight or a ModelError."""

    def spoil(tensors: Tensors) -> None:
        part = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors[part]
        match data.draw(st.sampled_from(["bits", "dtype", "shape", "drop", "number"])):
            case "bits":
                seed = data.draw(st.integers(0, 2**20))
                flat = tensor.flatten().view(torch.uint8)
                bits = torch.randint(0, 256, flat.shape, generator=torch.Generator().manual_seed(seed))
                tensors[part] = bits.to(torch.uint8).view(tensor.dtype).view(tensor.shape)
            case "dtype":
                dtypes = [torch.int8, torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn, torch.bool]
                tensors[part] = tensor.float().to(data.draw(st.sampled_from(dtypes)))
            case "shape":
                tensors[part] = data.draw(
                    st.sampled_from([tensor.flatten(), tensor.flatten()[:0], tensor.unsqueeze(0), tensor.flatten()[:1]])
                )
            case "drop":
                del tensors[part]
            case "number":
                value = data.draw(st.sampled_from([0, -1, 127, float("nan"), float("inf")]))
                filled = torch.full(tensor.shape, value)
                tensors[part] = filled.nan_to_num().to(tensor.dtype) if not tensor.dtype.is_floating_point else filled

    with tempfile.TemporaryDirectory() as scratch:
        read_or_refuse(changed(Path(scratch, "model"), folder, spoil))


@settings(max_examples=150)
@given(folder=st.sampled_from(sorted(SCHEMES)), data=st.data())
def test_any_change_of_a_config_field_is_read_or_refused(folder: str, data: st.DataObject) -> None:
    """A config field with any JSON value gives a finite weight or a ModelError."""
    config = read_json_object(DATA / folder / "config.json")["quantization_config"]
    place = config
    if "config_groups" in config and data.draw(st.booleans()):
        place = config["config_groups"]["group_0"]
        if data.draw(st.booleans()):
            place = place["weights"]
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    with tempfile.TemporaryDirectory() as scratch:
        read_or_refuse(changed(Path(scratch, "model"), folder, **config))


@settings(max_examples=60)
@given(folder=st.sampled_from(sorted(SCHEMES)), share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_early_is_refused(folder: str, share: float) -> None:
    """A safetensors file that ends early is refused, wherever it ends."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = changed(Path(scratch, "model"), folder)
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
            read_linear(directory, KEY, *SHAPES[KEY])


def assert_same_weight(one: Path, other: Path) -> None:
    first, second = (read_linear(directory, KEY, *SHAPES[KEY]) for directory in (one, other))
    assert first is not None
    assert second is not None
    assert torch.equal(first.unpack(), second.unpack())


def test_config_groups_without_weights_are_ignored(tmp_path: Path) -> None:
    """A config group without weights, as llm-compressor writes for attention, changes no weight."""
    plain = changed(tmp_path / "plain", "llmcompressor-int4")
    groups = read_json_object(plain / "config.json")["quantization_config"]["config_groups"]
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
    fields = {"config_groups": {"attention": attention, **groups}, "transform_config": {"config_groups": {}}}
    assert_same_weight(plain, changed(tmp_path / "more", "llmcompressor-int4", None, **fields))


def test_a_group_index_of_minus_ones_is_no_order(tmp_path: Path) -> None:
    """A group index of minus ones, which compressed-tensors writes without act-order, is no order."""
    plain = changed(tmp_path / "plain", "llmcompressor-int4")
    never = torch.full((SHAPES[KEY][1],), -1, dtype=torch.int32)
    more = changed(tmp_path / "more", "llmcompressor-int4", lambda tensors: tensors.update(weight_g_idx=never))
    assert_same_weight(plain, more)
