"""Frames: what is written is read, and anything else is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import PLAIN
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import HEADER_BYTES, BadFrame, FrameHeader, check_frame
from prefix_store.frames.layout import DTYPES, BlockLayout
from prefix_store.frames.segments import Bytes

BLOCK = BlockId(b"n" * 16, b"k" * 16, b"p" * 16, b"t" * 16)
LAYOUT = BlockLayout("bfloat16", (2, 2, 1, 4, 3), "lphtd")
FORMAT = FrameFormat(LAYOUT, PLAIN)
identities = st.binary(min_size=16, max_size=16)


def sealed(block: BlockId = BLOCK, form: FrameFormat = FORMAT) -> Bytes:
    frame = np.empty(form.frame_bytes, np.uint8)
    form.seal(block, [np.arange(form.layout.nbytes, dtype=np.uint8)], frame)
    return frame


@given(
    block=st.builds(BlockId, identities, identities, identities, identities),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
)
def test_what_is_sealed_is_verified_and_decoded(block: BlockId, dtype: str, shape: tuple[int, ...]) -> None:
    """Any block of any layout is restored bit by bit."""
    form = FrameFormat(BlockLayout(dtype, shape), PLAIN)
    frame = sealed(block, form)
    form.verify(block, frame)
    check_frame(frame.data, block.key, block.parent)
    into = np.zeros(form.layout.nbytes, np.uint8)
    form.decode(frame, [into])
    assert (into == np.arange(form.layout.nbytes, dtype=np.uint8)).all()


@given(bit=st.integers(0, FORMAT.frame_bytes * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    """A frame with one wrong bit, in header or payload, is bad, for its reader and for the server."""
    frame = sealed()
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadFrame):
        FORMAT.verify(BLOCK, frame)
    with pytest.raises(BadFrame):
        check_frame(frame.data, BLOCK.key, BLOCK.parent)


@given(size=st.integers(0, FORMAT.frame_bytes * 2))
def test_a_frame_of_another_size_is_bad(size: int) -> None:
    """A frame that is too short or too long is bad."""
    frame = np.resize(sealed(), size)
    if size == FORMAT.frame_bytes:
        FORMAT.verify(BLOCK, frame)
        return
    with pytest.raises(BadFrame):
        FORMAT.verify(BLOCK, frame)


@pytest.mark.parametrize("field", ["namespace", "key", "parent", "tokens"])
def test_another_block_is_named_by_the_field_that_differs(field: str) -> None:
    """An undamaged frame of another model, key, parent or text is refused."""
    parts = {name: getattr(BLOCK, name) for name in ("namespace", "key", "parent", "tokens")}
    other = BlockId(**{**parts, field: b"x" * 16})
    with pytest.raises(BadFrame, match=f"^{field} is another one$") as caught:
        FORMAT.verify(BLOCK, sealed(other))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (BlockLayout("float16", LAYOUT.shape, LAYOUT.axes), "dtype"),
        (BlockLayout("bfloat16", (2, 2, 2, 2, 3), LAYOUT.axes), "shape"),
        (BlockLayout("bfloat16", (2, 2, 1, 4, 3), "plhtd"), "axes"),
        (BlockLayout("bfloat16", LAYOUT.shape), "axes"),
        (BlockLayout("bfloat16", LAYOUT.shape, LAYOUT.axes, keys_transposed=True), "flags"),
        (BlockLayout("bfloat16", (2, 2, 1, 4, 4), LAYOUT.axes), "shape"),
    ],
)
def test_the_same_block_in_another_layout_is_another_frame(layout: BlockLayout, field: str) -> None:
    """A changed layout in the same namespace is detected before numbers are read in a wrong order."""
    with pytest.raises(BadFrame) as caught:
        FORMAT.verify(BLOCK, sealed(form=FrameFormat(layout, PLAIN)))
    assert caught.value.field == field


def test_a_header_of_another_version_says_so() -> None:
    """A frame of a later version is distinguished from a damaged one."""
    frame = sealed()
    frame[4] = 2
    with pytest.raises(BadFrame, match="version is 2, expected 1"):
        FrameHeader.unpack(frame[:HEADER_BYTES].data)


def test_the_format_stays_as_it_is() -> None:
    """The bytes of a frame of version 1 do not change."""
    frame = sealed().tobytes()
    assert frame[:8].hex() == "4b474b5601008000"
    assert frame[8:72] == b"n" * 16 + b"k" * 16 + b"p" * 16 + b"t" * 16
    assert frame[72:104].hex() == "0001050002000000020000000100000004000000030000006c70687464000000"
    assert frame[104:112].hex() == "6000000000000000"
    assert len(frame) == 128 + 96


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockLayout("float64", (1,)), "dtype is 'float64', expected one of float16"),
        (lambda: BlockLayout("int8", ()), r"shape is \(\), expected one to 5 sizes"),
        (lambda: BlockLayout("int8", (2, 0)), r"shape is \(2, 0\), expected"),
        (lambda: BlockLayout("int8", (2, 2), "pl"), "axes is 'pl' for 2 sizes, expected p, l, h, t and d"),
        (lambda: BlockLayout("int8", (3, 1, 1, 1, 1), "plhtd"), "axis p has size 3, expected 2"),
        (lambda: BlockLayout("int8", (2, 1, 1, 1, 1), "plhdt", keys_transposed=True), "expected 'td' as the last two"),
        (lambda: BlockLayout("int8", (2,), keys_transposed=True), "axes does not say where keys are"),
        (lambda: BlockId(b"n" * 16, b"k", b"p" * 16, b"t" * 16), "key has 1 bytes, expected 16"),
    ],
)
def test_what_is_no_layout_or_block_is_refused(make: object, message: str) -> None:
    """The message names what is wrong and what is expected."""
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
