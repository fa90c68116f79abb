"""A weight written in a public format is read back bit for bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.checkpoints.quantized.integer_weights import pack_words, unpack_words, words_of
from backend.checkpoints.quantized.writer import write_checkpoint
from backend.checkpoints.tensor_store import TensorStore
from backend.quantized_weights.float_scheme import FloatLinear, FloatScheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.quantized_linear import CannotQuantize, QuantizedLinear, Scheme
from tests.backend.checkpoints.quantized.directories import NAME, kept, read_linear, write_source
from tests.backend.quantization.schemes import SCHEMES, weights

MORE = (
    IntScheme(8, 32),
    IntScheme(8, None, "integer"),
    IntScheme(8, 64, "integer"),
    IntScheme(4),
    IntScheme(4, 32, activation_bits=8),
)
WRITTEN = tuple(scheme for scheme in (*SCHEMES, *MORE) if getattr(scheme, "zero", None) != "minimum")
every_scheme = pytest.mark.parametrize("scheme", WRITTEN, ids=[scheme.name for scheme in WRITTEN])


def written_and_read(linear: QuantizedLinear, weight: torch.Tensor) -> QuantizedLinear:
    with tempfile.TemporaryDirectory() as scratch:
        source = write_source(Path(scratch, "source"), {NAME: weight})
        write_checkpoint(Path(scratch, "written"), source, {NAME: linear})
        if isinstance(linear, FloatLinear):
            return FloatLinear(linear.scheme, TensorStore(Path(scratch, "written")).raw(f"{NAME}.weight").clone())
        back = read_linear(Path(scratch, "written"), NAME, *linear.shape)
        assert back is not None
        return back


@every_scheme
@settings(max_examples=15)
@given(weight=weights())
def test_a_weight_comes_back_bit_for_bit(scheme: Scheme, weight: torch.Tensor) -> None:
    """Codes, scales and zeros of every scheme with a public format are read back bit for bit."""
    linear = scheme.pack(weight)
    back = written_and_read(linear, weight)
    if (
        isinstance(linear, IntLinear)
        and linear.zeros is not None
        and bool((linear.zeros == linear.scheme.middle).all())
    ):
        # Zeros that are all in the middle need not be kept.
        linear = replace(linear, zeros=None, scheme=replace(linear.scheme, zero="middle"))
    assert kept(back) == kept(linear)


@every_scheme
@pytest.mark.parametrize("size", [6e4, 1e18, 1e21, 1e30])
def test_huge_weights_are_refused_or_read_back(scheme: Scheme, size: float) -> None:
    """Weights of a huge magnitude are refused before they are written, or are read back bit for bit."""
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(2)).clamp(-2, 2) * size
    try:
        linear = scheme.pack(weight)
    except CannotQuantize as refusal:
        assert "beyond the range" in str(refusal)  # noqa: PT017 - either is right
    else:
        assert kept(written_and_read(linear, weight)) == kept(linear)


@settings(max_examples=15)
@given(weight=weights(), seed=st.integers(0, 100), zero=st.sampled_from(["middle", "integer"]))
def test_columns_in_another_order_are_read_back(weight: torch.Tensor, seed: int, zero: str) -> None:
    """A weight with permuted columns is read back as the same weight."""
    scheme = IntScheme(4, 32, "integer" if zero == "integer" else "middle")
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed)).int()
    linear = replace(scheme.pack(weight[:, order.long()]), order=order)
    back = written_and_read(linear, weight)
    assert torch.equal(back.unpack(), linear.unpack())


def test_a_scheme_with_minima_is_refused(tmp_path: Path) -> None:
    """A scheme with minima is refused, as no public safetensors format holds them."""
    weight = torch.randn(2, 64)
    source = write_source(tmp_path / "source", {NAME: weight})
    with pytest.raises(CannotQuantize, match=r"q_proj: no public format holds int4-min-g32, expected"):
        write_checkpoint(tmp_path / "written", source, {NAME: IntScheme(4, 32, "minimum").pack(weight)})


def test_sixteen_bits_are_left_plain(tmp_path: Path) -> None:
    """16-bit weights are written plain, and a model of these alone has no quantization_config."""
    weight = torch.randn(2, 64)
    source = write_source(tmp_path / "source", {NAME: weight})
    write_checkpoint(tmp_path / "written", source, {NAME: FloatScheme("float16").pack(weight)})
    assert "quantization_config" not in (tmp_path / "written/config.json").read_text(encoding="utf-8")
    assert torch.equal(TensorStore(tmp_path / "written").raw(f"{NAME}.weight"), weight.half())


@given(st.sampled_from([4, 8]), st.lists(st.integers(0, 255), max_size=40))
def test_codes_packed_in_words_are_restored(bits: int, codes: list[int]) -> None:
    """Codes are restored from 32-bit words, with the first code in the lowest bits."""
    tensor = torch.tensor([code % (1 << bits) for code in codes], dtype=torch.uint8)
    words = pack_words(tensor, bits)
    assert words.shape == (words_of(len(codes), bits),)
    assert torch.equal(unpack_words(words, bits, len(codes)), tensor)
    if len(codes):
        assert int(words[0]) % (1 << bits) == int(tensor[0])
