"""Codecs: round trips, error bounds and sizes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from prefix_store.codecs.codec import CannotEncode, Codec, stored_key
from prefix_store.codecs.frame_format import FrameFormat, SealedBlock
from prefix_store.codecs.registry import CODECS, PLAIN, codec_named
from prefix_store.codecs.scaled import FP8, INT8, Scaled, keys_and_values
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes

LAYOUTS = [
    pytest.param("lphtd", (3, 2, 2, 4, 8), False, id="layers-parts-heads"),
    pytest.param("plthd", (2, 3, 4, 2, 8), False, id="parts-layers-tokens"),
    pytest.param("lhptd", (3, 2, 2, 4, 8), True, id="transposed-keys"),
]
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-22}
SMALLEST = {"float16": 2**-24, "bfloat16": 2**-126, "float32": 2**-126}


def round_trip(codec: Codec, layout: BlockLayout, block: Bytes) -> Bytes:
    payload = np.full(codec.payload_bytes(layout), 0xEE, np.uint8)
    codec.encode([block], layout, payload)
    back = np.full(layout.nbytes, 0xEE, np.uint8)
    codec.decode(payload, layout, [back])
    return back


def numbers(seed: int, exponent: int, layout: BlockLayout) -> Bytes:
    """Normal numbers scaled by channel and layer, with some zeros; none is infinite in the layout's dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.shape, generator=generator) * torch.randn(layout.shape[-1], generator=generator).exp()
    values *= 2.0**exponent
    values[torch.rand(layout.shape, generator=generator) < 0.1] = 0.0
    dtype = getattr(torch, layout.dtype)
    most = torch.finfo(dtype).max
    block: Bytes = values.clamp(-most, most).to(dtype).view(torch.uint8).numpy().ravel()
    return block


def error_bound(codec: Scaled, part: int, x: torch.Tensor, y: torch.Tensor, dtype: str) -> torch.Tensor:
    """The error bound of `Scaled` per element."""
    along = codec.keys_along if part == 0 else 3
    scale = (x.abs().amax(along, keepdim=True) / codec.largest * 1.008).clamp_min(2.0**-133)
    off = torch.maximum(x.abs() / 16, scale / 1024) if codec.is_float else scale / 2
    return off * (1 + 2**-20) + y.abs() * ROUNDING[dtype] + SMALLEST[dtype]


@pytest.mark.parametrize(("axes", "shape", "transposed"), LAYOUTS)
@pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ROUNDING)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-140, 130))
@example(seed=0, exponent=200)
@example(seed=0, exponent=16)
@example(seed=0, exponent=-200)
def test_no_number_is_further_off_than_stated(
    dtype: str, codec: Scaled, axes: str, shape: tuple[int, ...], transposed: bool, seed: int, exponent: int
) -> None:
    """The error bound in `Scaled` holds for numbers of any size, for keys and for values, in every layout."""
    layout = BlockLayout(dtype, shape, axes, transposed)
    block = numbers(seed, exponent, layout)
    back = round_trip(codec, layout, block)
    parts = zip(keys_and_values(block, layout), keys_and_values(back, layout), strict=True)
    for part, (before, after) in enumerate(parts):
        x, y = before.double(), after.double()
        assert torch.isfinite(y).all()
        assert ((x - y).abs() <= error_bound(codec, part, x, y, dtype)).all()


@pytest.mark.parametrize(("axes", "shape", "transposed"), LAYOUTS)
def test_keys_and_values_are_the_same_in_every_layout(axes: str, shape: tuple[int, ...], transposed: bool) -> None:
    """Layer, head, token and dimension give the same number for any order in memory."""
    layout = BlockLayout("float32", shape, axes, transposed)
    block = np.zeros(shape, np.float32)
    for place in np.ndindex(shape):
        at = dict(zip(axes, place, strict=True))
        if transposed and at["p"] == 0:
            flat = at["t"] * layout.size("d") + at["d"]
            at["d"], at["t"] = divmod(flat, layout.size("t"))
        block[place] = at["p"] * 10_000 + at["l"] * 1000 + at["h"] * 100 + at["t"] * 10 + at["d"]
    keys, values = keys_and_values(block.view(np.uint8).ravel(), layout)
    assert keys.shape == values.shape == (3, 2, 4, 8)
    for layer, head, token, dimension in itertools.product(range(3), range(2), range(4), range(8)):
        expected = layer * 1000 + head * 100 + token * 10 + dimension
        assert keys[layer, head, token, dimension] == expected
        assert values[layer, head, token, dimension] == expected + 10_000


@given(block=st.binary(min_size=96, max_size=96))
def test_plain_keeps_every_bit(block: bytes) -> None:
    """NaN bits are kept, too."""
    data = np.frombuffer(block, np.uint8)
    assert (round_trip(PLAIN, BlockLayout("bfloat16", (48,)), data) == data).all()


@pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_stored(codec: Codec, bad: float) -> None:
    """Encoding a non-finite value fails."""
    layout = BlockLayout("float16", (1, 2, 1, 4, 8), "lphtd")
    block = np.ones(64, np.float16)
    block[37] = bad
    with pytest.raises(CannotEncode, match="holds no infinite numbers"):
        round_trip(codec, layout, block.view(np.uint8))


@pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)
def test_a_frame_takes_little_more_than_half_of_float16(codec: Codec) -> None:
    """For SmolLM2-135M, with header and scales."""
    layout = BlockLayout("float16", (30, 2, 3, 16, 64), "lphtd")
    assert FrameFormat(layout, codec).frame_bytes <= 0.54 * layout.nbytes


@pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)
@pytest.mark.parametrize("layout", [BlockLayout("float16", (4, 8)), BlockLayout("uint8", (1, 2, 1, 4, 8), "lphtd")])
def test_a_codec_refuses_layouts_that_it_cannot_read(codec: Codec, layout: BlockLayout) -> None:
    """The error comes when the format is made."""
    with pytest.raises(ValueError, match=f"{codec.name} cannot store a block of dtype {layout.dtype}"):
        FrameFormat(layout, codec)


@given(key=st.binary(min_size=16, max_size=16))
def test_lossy_forms_have_keys_of_their_own(key: bytes) -> None:
    """A block has a different key for each lossy codec; the exact form has the block's own key."""
    keys = {codec.name: stored_key(codec, key) for codec in CODECS.values()}
    assert keys["plain"] == key
    assert len(set(keys.values())) == len(CODECS)


def test_stored_keys_stay_as_they_are() -> None:
    """Blocks that an earlier version stored are found."""
    assert stored_key(INT8, bytes(16)).hex() == "2862f58fd1944731d3860db93569c441"
    assert stored_key(FP8, bytes(16)).hex() == "cc4956d42e81eb77e0590aa9822c95fe"


def test_an_unknown_codec_is_refused() -> None:
    """The message lists the codecs."""
    with pytest.raises(ValueError, match="codec is 'zip', expected one of plain, int8, fp8"):
        codec_named("zip")


@pytest.mark.parametrize("codec", [PLAIN, INT8])
def test_a_block_with_a_frame_is_encoded_only_for_another_format(codec: Codec) -> None:
    """The frame of the same format is copied as it is; for another one the block itself is encoded."""
    layout = BlockLayout("float16", (3, 2, 2, 4, 8), "lphtd")
    own, plain = FrameFormat(layout, codec), FrameFormat(layout, PLAIN)
    block, segments = BlockId(*(bytes([number] * 16) for number in range(4))), [numbers(1, 0, layout)]
    encoded, other = np.zeros(own.frame_bytes, np.uint8), np.zeros(plain.frame_bytes, np.uint8)
    own.seal(block, segments, encoded)
    marked = np.full(plain.frame_bytes, 7, np.uint8)
    plain.seal(block, SealedBlock(plain, marked, segments), other)
    assert (other == marked).all()
    fresh = np.zeros(own.frame_bytes, np.uint8)
    own.seal(block, SealedBlock(plain, marked, segments), fresh)
    assert (fresh == (marked if codec is PLAIN else encoded)).all()
