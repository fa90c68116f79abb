"""A hostile config.json or tokenizer.json is refused at once, in one line that says what would be right."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend.commands.plan import make_plan
from backend.errors import ModelError
from backend.models.hf_config import read_hf_config
from backend.models.json_fields import Fields
from backend.models.rope import rope_table
from backend.text.detokenizer import TokenBytes
from tests.backend.models.test_config import LLAMA, read
from tests.backend.random_models import KINDS

HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], expected 'silu' or"),
        ({"hidden_act": []}, "hidden_act is [], expected 'silu' or"),
        ({"model_type": "gemma2", "hidden_activation": {"silu": 1}}, "hidden_activation is {'silu': 1}, expected"),
        ({"rms_norm_eps": HUGE}, "rms_norm_eps is 1000000"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps is 1e-300, expected from 1e-12 to 1e+12"),
        ({"rope_theta": HUGE}, "00000, expected from 1e-12 to 1e+12"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, "rope_scaling: factor is 1e+300, expected from"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type is ['linear'], expected 'default', 'linear' or"),
        ({"rope_scaling": {**dict.fromkeys(("original_max_position_embeddings",), HUGE), "type": "llama3"}}, "at most"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 4096"),
        ({"model_type": "mistral", "num_hidden_layers": 10**30}, "num_hidden_layers is 1000000"),
        ({"model_type": "smollm3", "num_hidden_layers": 10**9}, "expected at most 4096"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, expected at most 4194304"),
        ({"max_position_embeddings": 10**18}, "expected at most 4194304"),
        (
            {"max_position_embeddings": 2**22, "head_dim": 2**14},
            "max_position_embeddings is 4194304, expected at most 65536 for head_dim 16384",
        ),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1, expected at least 2: a token and its answer"),
        ({"hidden_size": HUGE}, "expected at most 2147483647"),
        ({"model_type": "gemma2", "hidden_size": HUGE}, "expected at most 2147483647"),
        ({"head_dim": 10**20}, "expected at most 16384"),
        ({"hidden_size": 2**30}, "hidden_size is 1073741824, expected num_attention_heads (4) times 1 to 16384"),
        ({"hidden_size": 2}, "hidden_size is 2, expected num_attention_heads (4) times 1 to 16384"),
        ({"model_type": "qwen3_moe", "num_experts": 10**18}, "num_experts is 1000000000000000000, expected at most"),
        ({"eos_token_id": ["x"] * 10**6}, "eos_token_id is ['x', 'x',"),
        ({"hidden_act": "x" * 10**6}, "hidden_act is 'xxx"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3"}}, "text_config: model_type is 'gemma3'"),
    ],
    ids=range(25),
)
def test_a_hostile_value_is_refused_in_a_short_line(changes: dict[str, Any], message: str) -> None:
    """A value out of range or of a wrong type is refused with its field in a line of less than 400 characters."""
    with pytest.raises(ModelError) as refused:
        read(**changes)
    said = str(refused.value)
    assert said.startswith("config.json: ")
    assert message in said
    assert len(said) < 400


def test_control_characters_of_a_name_are_replaced() -> None:
    """Control characters of a name from the file are replaced in the message."""
    error = Fields({}, "config.json: config_groups.a\nb\x1b[31m").error("bits", "4 or 8")
    assert str(error) == "config.json: config_groups.a?b?[31m: bits is None, expected 4 or 8"


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 10**30, HUGE, 0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf")),
    *("", "x", "1", [], [1], ["x"], [[1]], [None], {}, {"a": 1}, {"rope_type": []}, {"rope_type": "llama3"}),
    *({"full_attention": 3}, {"full_attention": {"rope_type": "linear", "factor": "x"}}, {"sliding_attention": []}),
    *([True] * 10, ["full_attention"] * 10),
)
OTHERS = (
    *("rope_scaling", "rope_parameters", "layer_types", "no_rope_layers", "sliding_window_pattern", "mlp_only_layers"),
    *("decoder_sparse_step", "partial_rotary_factor", "use_bidirectional_attention", "text_config", "eos_token_id"),
    *("max_window_layers", "rope_theta", "hidden_activation", "query_pre_attn_scalar", "num_experts", "head_dim"),
    *("num_local_experts", "rope_local_base_freq", "final_logit_softcapping"),
)


def test_random_values_are_read_or_refused_in_one_line() -> None:
    """Random values of any config field give a config that can be planned, with finite rotations, or one line."""
    draw = random.Random(11)  # noqa: S311 - no secret
    kinds = [json.loads(json.dumps(kind.config().to_dict())) for kind in KINDS.values()]
    read_at_all, said = 0, []
    for _ in range(3000):
        values = dict(draw.choice(kinds))
        for _ in range(draw.choice([1, 1, 2, 3])):
            values[draw.choice([*values, *OTHERS])] = draw.choice(VALUES)
        try:
            config = read_hf_config(values, "config.json")
        except ModelError as error:
            said.append(str(error))
            continue
        read_at_all += 1
        make_plan("a model", config, 2**34)
        assert bool(rope_table(config, 8).isfinite().all())
    assert read_at_all > 500
    assert all(len(message.splitlines()) == 1 and len(message) < 1000 for message in said)


def test_rotations_are_finite_at_every_bound() -> None:
    """Rotations are finite at every bound of the base and its scaling, up to the last position."""
    for theta in (1e-12, 1e12):
        for factor in (1e-12, 1e12):
            config = read(rope_theta=theta, rope_scaling={"rope_type": "linear", "factor": factor})
            assert bool(rope_table(config, 2**16).isfinite().all())
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1e-12, "high_freq_factor": 2e-12}
            config = read(rope_theta=theta, rope_scaling={**scaling, "original_max_position_embeddings": 2**31 - 1})
            assert bool(rope_table(config, 2**16).isfinite().all())


def test_keepgate_plan_refuses_a_huge_number_of_layers(tmp_path: Path) -> None:
    """`keepgate plan` refuses a huge number of layers in one line without counting them."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**9}))
    words = [sys.executable, "-m", "backend.commands.plan", str(tmp_path), "--memory", "8GiB"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "config.json: num_hidden_layers is 1000000000, expected at most 4096" in ended.stderr


@pytest.mark.parametrize("token_id", [2**22, 2**31, 2**32 - 1])
def test_a_token_id_beyond_all_vocabularies_is_refused(token_id: int) -> None:
    """A token id beyond all vocabularies is refused before a list of that length is made."""
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": token_id}}, "decoder": {"type": "ByteLevel"}}
    with pytest.raises(ModelError, match=rf"tokenizer\.json: vocab has a token of id {token_id}, expected ids below"):
        TokenBytes(json.dumps(vocabulary), 10)


@pytest.mark.parametrize("decoder", [["ByteLevel"], {"type": "Sequence", "decoders": [["ByteLevel"]]}, None])
def test_a_decoder_that_is_no_object_is_refused(decoder: object) -> None:
    """A tokenizer decoder that is not an object is refused."""
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder \[\] is not supported, expected ByteLevel or"):
        TokenBytes(json.dumps({"model": {"type": "BPE", "vocab": {}}, "decoder": decoder}), 10)
