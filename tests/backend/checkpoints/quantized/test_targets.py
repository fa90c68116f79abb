"""Configs select modules by name, pattern or class, as the packages that write them do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.utils.match import match_targets  # type: ignore[import-untyped] # it publishes no types
from hypothesis import given
from hypothesis import strategies as st

from backend.checkpoints.quantized.targets import Targets
from backend.models.json_fields import Fields
from tests.backend.checkpoints.quantized.directories import read_linear
from tests.backend.checkpoints.quantized.test_public_packages import DATA, KEY, SHAPES

NAMES = ("model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj", "model.layers.1.self_attn.q_proj", "lm_head")
CHOICES = (
    "Linear",
    "Embedding",
    "lm_head",
    NAMES[0],
    "up_proj",
    "re:.*up_proj",
    "re:model.layers.1",
    "re:up_proj",
    "re:.*",
)


@given(name=st.sampled_from(NAMES), targets=st.lists(st.sampled_from(CHOICES), max_size=4))
def test_targets_match_as_in_compressed_tensors(name: str, targets: list[str]) -> None:
    """A target matches a module as in compressed-tensors, whose first match is the closest."""
    rank = Targets(Fields({"targets": targets}, "config.json"), "targets").match(name)
    theirs = match_targets(name, torch.nn.Linear(1, 1), targets)
    expected = 0
    if theirs:
        expected = 3 if theirs[0] == name else 2 if theirs[0].startswith("re:") else 1
    assert rank == expected


def test_the_closest_group_is_taken(tmp_path: Path) -> None:
    """A module that one group names and another group's pattern matches is of the group that names it."""
    shutil.copytree(DATA / "llmcompressor-int4", tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    groups = config["quantization_config"]["config_groups"]
    right = groups["group_0"]
    wrong = {**right, "weights": {**right["weights"], "group_size": 16}}
    for targets, others in ((["re:.*k_proj"], ["Linear"]), ([KEY], ["re:.*", "Linear"])):
        groups |= {"group_0": {**wrong, "targets": others}, "group_1": {**right, "targets": targets}}
        path.write_text(json.dumps(config), encoding="utf-8")
        linear = read_linear(tmp_path / "model", KEY, *SHAPES[KEY])
        assert linear is not None
        assert linear.scheme.name == "int4-g32"


def test_gptq_has_other_settings_for_some_modules(tmp_path: Path) -> None:
    """GPTQ's `dynamic` settings of the first matching pattern override the defaults."""
    shutil.copytree(DATA / "gptqmodel-gptq", tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    others = {"-:.*lm_head": {}, "+:.*k_proj": {"bits": 4, "group_size": 32}, ".*": {"bits": 8}}
    config["quantization_config"] |= {"bits": 8, "group_size": -1, "dynamic": others}
    path.write_text(json.dumps(config), encoding="utf-8")
    linear = read_linear(tmp_path / "model", KEY, *SHAPES[KEY])
    assert linear is not None
    assert linear.scheme.name == "int4-g32"
