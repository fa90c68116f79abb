"""Quantised weights and integer KV of the fused step: their error bounds and their determinism."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from backend.model_loader.linears import Weight, as_floats, linears
from backend.model_loader.weights import Linear, ModelWeights, dense
from backend.models.config import KvDtype, ModelConfig
from backend.quantization.selection.choice import quantised
from backend.quantization.selection.rounding import rounded
from backend.quantized_weights.fp8_scheme import Fp8Linear, Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme, Zero, unpack_nibbles
from backend.quantized_weights.nf4_scheme import LEVELS, Nf4Linear, Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme
from backend.runners.choice import choose_runner
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.layout import (
    GROUP,
    Kernels,
    KVPrecision,
    pack_panels,
    rounds_rows_coarsely,
    shared_order,
)
from backend.runners.fused.runner import FusedRunner
from backend.runners.torch.runner import TorchRunner
from backend.runners.warm_up import single_sequence_step
from tests.backend import tiny_model
from tests.backend.conftest import built_library, quiet
from tests.backend.random_models import chunked, random_tokens, relative_error
from tests.backend.runners.cuda.random_model import random_weights
from tests.backend.runners.fused_schemes import INT8, NAMES, kept, reordered
from tests.backend.runners.test_fused import ENGINE, small

TOKENS = random_tokens(90)
TINY_TOKENS = TOKENS % 100 + 10
ZEROS: tuple[Zero, ...] = ("middle", "integer", "minimum")
FORMATS: list[tuple[str, KVPrecision]] = [
    *((name, "float16") for name in NAMES),
    *((name, "int8") for name in ("float16", "int8", "int4", "nf4")),
]
every_format = pytest.mark.parametrize(("name", "kv"), FORMATS, ids=["-".join(names) for names in FORMATS])
SCHEMES: tuple[Scheme, ...] = (
    INT8,
    *(IntScheme(8, group) for group in (32, 64, 128)),
    *(IntScheme(4, group, zero) for group in (32, 64, 128) for zero in ZEROS),
    IntScheme(4),
    Fp8Scheme(),
    Fp8Scheme("tensor"),
    Nf4Scheme(),
    Nf4Scheme(128, double=False),
)


def tiny(weights: ModelWeights, kv: KVPrecision = "float16", threads: int = 1) -> FusedRunner:
    """A runner of the tiny model, whose intermediate size fills no panel of 32 columns."""
    return FusedRunner(built_library(), tiny_model.CONFIG, weights, 8, 128, threads, kv)


def products(weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, in] times a weight, the head of a model that adds nothing to its embedding: [T, out]; see `normed`."""
    outputs, inputs = weight.shape
    config = dataclasses.replace(
        tiny_model.CONFIG, vocab_size=max(outputs, len(rows)), hidden_size=inputs, num_layers=1, rms_norm_eps=0.0
    )
    made = random_weights(config)
    embedding = functional.pad(rows, (0, 0, 0, config.vocab_size - len(rows)))
    layer = made.layers[0]
    mlp = dataclasses.replace(layer.mlps[0], down=Linear(torch.zeros_like(layer.down.dense), None))
    silent = dataclasses.replace(layer, output=Linear(torch.zeros_like(layer.output.dense), None), mlps=(mlp,))
    weights = ModelWeights(embedding, (silent,), torch.ones(inputs), weight)
    config = dataclasses.replace(config, vocab_size=outputs)
    runner = FusedRunner(built_library(), config, weights, 8, 128, 1)
    return runner.run(single_sequence_step(np.arange(len(rows), dtype=np.int32), 0)).logits


def normed(rows: torch.Tensor) -> torch.Tensor:
    """The rows that `products` multiplies, in float64."""
    halves = rows.half().double()
    return halves / halves.square().mean(dim=-1, keepdim=True).sqrt()


def built_kernels() -> Kernels:
    return Kernels.of(built_library())


def rounded_rows(rows: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Rows [T, in] as products with a weight see them.

    Where integers are multiplied, GROUP inputs share a scale, and for most weights have two digits in place of one if
    the square of their largest value is above twice the groups' mean of those.
    """
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16 and built_kernels().bfloat16_dots:
        return rows.float().bfloat16().double()
    if not rounds_rows_coarsely(weight, built_kernels()):
        return rows
    groups = rows.unflatten(-1, (-1, GROUP))  # type: ignore[no-untyped-call] # torch publishes no types for it
    peaks = groups.abs().amax(dim=-1, keepdim=True)
    two = peaks.square() > 2 * peaks.square().mean(dim=-2, keepdim=True)
    if isinstance(weight, Nf4Linear) and not built_kernels().byte_dots:
        two = torch.zeros_like(two)
    scales = peaks / torch.where(two, 255 * 127 + 127, 127)
    whole: torch.Tensor = (torch.round(groups / scales) * scales).flatten(-2)
    return whole


def random_rows(count: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))


def bits_of(weight: Weight) -> torch.Tensor:
    """The unpacked weight in float64 [out, in], with the levels of NF4 as the fused step has them."""
    if not isinstance(weight, Nf4Linear):
        return dense(weight).double()
    levels = torch.tensor([round(127 * level) / 127 for level in LEVELS], dtype=torch.float64)
    scales = weight.scales.unpack().view(weight.shape[0], -1, 1).double()
    blocks = levels[unpack_nibbles(weight.codes).long()].view(*scales.shape[:2], -1)
    return (blocks * scales).flatten(1)


def assert_product(got: torch.Tensor, rows: torch.Tensor, weight: Weight) -> None:
    """The product is right up to float sums, half float scales and minima, and one input between two steps."""
    bits = bits_of(weight)
    error = (got.double() - functional.linear(rows, bits)).abs()
    step = rows.abs().max() / (127 if rounds_rows_coarsely(weight, built_kernels()) else 32767) * bits.abs().max()
    assert bool((error <= 1e-3 * functional.linear(rows.abs(), bits.abs()) + step).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(1, 20),
    outputs=st.integers(1, 80),
    inputs=st.sampled_from([128, 384]),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-3, 0.05, 10.0]),
)
def test_products_match_the_unpacked_weights(
    scheme: Scheme, count: int, outputs: int, inputs: int, seed: int, size: float
) -> None:
    """Products of any scheme, number of rows and outputs match float64 on the unpacked weights and rounded rows."""
    rows, weight = random_rows(count, inputs, seed), scheme.pack(random_rows(outputs, inputs, seed + 1) * size)
    assert_product(products(weight, rows), rounded_rows(normed(rows), weight), weight)


@pytest.mark.parametrize("scheme", [IntScheme(4, 64, "integer"), IntScheme(8, 64)], ids=lambda scheme: scheme.name)
def test_products_round_rows_in_the_order_of_groups(scheme: IntScheme) -> None:
    """Rows are rounded in the order of the weight's groups."""
    rows, weight = random_rows(5, 128), reordered(random_rows(40, 128, seed=1), scheme, seed=2)
    assert weight.order is not None
    order = weight.order.long()
    rounded_in_order = rounded_rows(normed(rows)[:, order], weight)
    assert_product(products(weight, rows), rounded_in_order[:, order.argsort()], weight)


@pytest.mark.parametrize("scheme", [IntScheme(4, 32), IntScheme(8, 32)], ids=lambda scheme: scheme.name)
def test_a_scale_may_be_negative(scheme: IntScheme) -> None:
    """A product with negative scales, as Q4_0 blocks have them, is right."""
    rows, weight = random_rows(5, 128), scheme.pack(random_rows(40, 128, seed=1))
    turned = dataclasses.replace(weight, scales=-weight.scales)
    assert_product(products(turned, rows), rounded_rows(normed(rows), turned), turned)


def test_every_eight_bit_code_multiplies_right() -> None:
    """Every 8-bit integer and float code multiplies right, the lowest integer and subnormal floats included."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(8, 1)
    rows = random_rows(7, 256)
    integers = IntLinear(INT8, codes, torch.full((8, 1), 0.01))
    assert_product(products(integers, rows), rounded_rows(normed(rows), integers), integers)
    codes[:, [0x7F, 0xFF]] = 0  # which are no numbers
    floats = Fp8Linear(Fp8Scheme("tensor"), codes.view(torch.float8_e4m3fn), torch.full((1, 1), 0.01))
    assert_product(products(floats, rows), normed(rows), floats)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.full((2, 32), 1e6), "a weight is NaN or outside the range"),
        (torch.full((2, 32), torch.nan), "a weight is NaN or outside the range"),
        (IntLinear(IntScheme(4), torch.zeros(2, 16, dtype=torch.uint8), torch.full((2, 1), 1e6)), "a scale is NaN"),
        (Nf4Scheme(double=False).pack(torch.full((2, 64), 1e6)), "a scale is NaN"),
        (
            Fp8Linear(Fp8Scheme(), torch.full((2, 32), torch.nan).to(torch.float8_e4m3fn), torch.ones(2, 1)),
            "not a number",
        ),
    ],
)
def test_weights_beyond_half_floats_are_refused(weight: Weight, message: str) -> None:
    """A weight or scale that is NaN or beyond half floats is refused, so that torch serves it."""
    with pytest.raises(RunnerUnavailable, match=message):
        pack_panels(weight, built_kernels())


def test_an_invalid_input_order_is_refused() -> None:
    """An input order that is no permutation is refused."""
    weight = reordered(torch.ones(2, 64), IntScheme(4, 32), seed=0)
    assert weight.order is not None
    weight.order[3] = 64
    with pytest.raises(RunnerUnavailable, match="does not name each of them once"):
        shared_order([weight])


@every_format
def test_a_step_matches_the_reference_on_its_weights(
    config: ModelConfig, weights: ModelWeights, name: str, kv: KVPrecision
) -> None:
    """A step differs from the reference on the same weights by the rounding of activations and KV only."""
    small_config, small_weights = cut(config, weights)
    some = kept(small_weights, name)
    fused = FusedRunner(built_library(), small_config, some, 8, 128, 2, kv)
    reference = TorchRunner(small_config, as_floats(some), 8, 128)
    nearly_floats = name == "float16" or (name.startswith(("int8", "fp8")) and not built_kernels().byte_dots)
    allowed = (0.001 if nearly_floats else 0.02) + (0.02 if kv == "int8" else 0)
    assert relative_error(chunked(fused, TOKENS, 90), chunked(reference, TOKENS, 90)) < allowed


def cut(config: ModelConfig, weights: ModelWeights) -> tuple[ModelConfig, ModelWeights]:
    """The real model's first two layers and some of its tokens."""
    small_config, small_weights = small(config, weights)
    embedding = small_weights.embedding[:1000]
    return (
        dataclasses.replace(small_config, vocab_size=1000),
        dataclasses.replace(small_weights, embedding=embedding, head=embedding),
    )


@every_format
def test_neither_chunks_nor_threads_change_a_bit(name: str, kv: KVPrecision) -> None:
    """In every format logits are bitwise the same for every chunking and number of threads."""
    some = kept(tiny_model.weights(), name)
    runs = [
        chunked(tiny(some, kv, threads), TINY_TOKENS, *sizes)
        for threads, sizes in ((1, [90]), (3, [90]), (2, [1, 2, 3, 4, 5, 6, 7, 8, 13, 41]), (2, [17] + [1] * 73))
    ]
    for one, other in itertools.pairwise(runs):
        assert torch.equal(one, other)


@every_format
def test_nan_rows_have_nan_logits(name: str, kv: KVPrecision) -> None:
    """A row with NaN has NaN logits in every format."""
    runner = tiny(kept(tiny_model.weights(), name), kv)
    tokens = np.array([10, 11, tiny_model.POISON, 12], dtype=np.int32)
    logits = runner.run(single_sequence_step(tokens, 0)).logits
    assert torch.isfinite(logits[:2]).all()
    assert torch.isnan(logits[2:]).any(dim=-1).all()


@pytest.mark.parametrize("kv", ["float16", "int8"])
@pytest.mark.parametrize("poisoned", range(1, 20))
def test_a_nan_token_changes_no_earlier_row(poisoned: int, kv: KVPrecision) -> None:
    """A token with NaN changes no bit of earlier rows in the same step."""
    tokens = np.arange(10, 30, dtype=np.int32)
    expected = tiny(tiny_model.weights(), kv).run(single_sequence_step(tokens, 0)).logits[:poisoned]
    tokens[poisoned] = tiny_model.POISON
    logits = tiny(tiny_model.weights(), kv).run(single_sequence_step(tokens, 0)).logits[:poisoned]
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float16", {"float16"}),
        ("int4", {"int4-min-g32", "int8-g64"}),
        ("int8-g32", {"int8-g32", "float16"}),
        ("int8-asym-g32", {"int8-asym-g32-as-float16", "float16"}),
        ("mixed", {"int4-g64", "int8", "nf4", "int4-min-g32", "fp8", "float16"}),
        ("act-order", {"int4-asym-g32", "int8", "int4-g32-as-float16"}),
    ],
)
def test_each_matrix_has_its_own_layout(name: str, expected: set[str]) -> None:
    """Parts of one matrix may have different schemes, and a part without a layout is widened and named so."""
    assert set(tiny(kept(tiny_model.weights(), name)).weight_bytes) == expected


@pytest.mark.parametrize(("scheme", "most"), [(INT8, 0.53), (IntScheme(4, 64), 0.29), (Nf4Scheme(), 0.27)])
def test_quantised_weights_take_their_share_of_sixteen_bits(
    config: ModelConfig, weights: ModelWeights, scheme: Scheme, most: float
) -> None:
    """Panels and scales of the real model take at most their share of the bytes of 16-bit weights."""
    small_config, small_weights = cut(config, weights)
    runner = FusedRunner(built_library(), small_config, rounded(small_weights, scheme), 8, 128, 1)
    half_bytes = 2 * sum(weight.numel() for weight in map(dense, linears(small_weights).values()))
    assert runner.weight_bytes[scheme.name] <= most * half_bytes


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("float16", "float16"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("fp8", "fp8-head-int8-g64"),
        ("fp8-tensor", "fp8-tensor-head-fp8"),
        ("int8-g32", "int8-g32-head-float16"),
        ("int8-asym-g32", "int8-asym-g32-as-float16-head-float16"),
    ],
)
def test_a_runner_names_the_schemes_of_its_weights(name: str, precision: str) -> None:
    """A runner's name and precision are the names of its schemes."""
    runner = tiny(kept(tiny_model.weights(), name), "int8")
    assert runner.weights_precision == precision
    assert runner.name == f"fused-{precision}-kv-int8"


def test_two_mixtures_have_two_names() -> None:
    """Different mixtures of schemes have different names, so they share no prefixes."""
    weights = tiny_model.weights()
    names = {
        tiny(dataclasses.replace(some, layers=some.layers[::order])).weights_precision
        for some in (
            kept(weights, "mixed"),
            dataclasses.replace(kept(weights, "mixed"), layers=(kept(weights, "int8").layers[0], weights.layers[1])),
        )
        for order in (1, -1)
    }
    assert len(names) == 3
    assert all(name.startswith("mixed-") and name.endswith("-head-int8") for name in names)


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize(
    ("name", "stored_as"),
    [
        ("none", "float16"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("fp8", "fp8-head-int8-g64"),
        ("nf4", "nf4-head-int8-g64"),
    ],
)
def test_every_quantization_option_passes_its_self_test(
    config: ModelConfig, weights: ModelWeights, name: str, stored_as: str, kv: KvDtype
) -> None:
    """Each `--quantization` and KV dtype passes its self-test and is named by the runner."""
    built_library()
    small_config, small_weights = cut(config, weights)
    packed, _ = quantised(small_weights, name)
    runner = choose_runner(small_config, packed, dataclasses.replace(ENGINE, kv_dtype=kv), 128, quiet)
    assert runner.name == f"fused-{stored_as}" + ("-kv-int8" if kv == "int8" else "")


@pytest.mark.parametrize("name", ["fp8", "nf4", "mixed", "act-order"])
def test_weights_that_are_quantised_already_are_served_as_they_are(
    config: ModelConfig, weights: ModelWeights, name: str
) -> None:
    """Weights that are quantised already are served as they are."""
    built_library()
    small_config, small_weights = cut(config, weights)
    runner = choose_runner(small_config, kept(small_weights, name), ENGINE, 128, quiet)
    assert runner.name.startswith(f"fused-{'mixed' if name == 'act-order' else name}")


def test_torch_serves_quantised_weights_without_the_fused_step(config: ModelConfig, weights: ModelWeights) -> None:
    """Torch serves quantised weights where the fused step does not compute in the requested dtype."""
    small_config, small_weights = cut(config, weights)
    packed, _ = quantised(small_weights, "int4")
    runner = choose_runner(small_config, packed, dataclasses.replace(ENGINE, dtype="float32"), 128, quiet)
    assert runner.name.startswith("torch-float32")


def test_integer_kv_takes_a_little_more_than_half(config: ModelConfig) -> None:
    """Integer KV takes one byte for each number and a scale for each token and head."""
    ratio = FusedRunner.block_bytes(config, "int8") / FusedRunner.block_bytes(config)
    assert ratio == pytest.approx(0.5 + 4 / (2 * config.head_dim))


@pytest.mark.parametrize("scheme", [INT8, Nf4Scheme(16), IntScheme(4, 16)])
def test_widths_without_whole_groups_are_widened(scheme: Scheme) -> None:
    """A width that the groups do not divide is widened to float16."""
    assert pack_panels(scheme.pack(torch.ones(3, 48)), built_kernels()).stored_as == f"{scheme.name}-as-float16"
