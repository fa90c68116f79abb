"""Tool calls are found in an answer however it is cut into pieces."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.chat.tool_format import ToolFormat, detect_tool_format
from backend.chat.tool_parser import ToolCallDelta, ToolParser
from tests.backend.chat import tool_templates

ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.one_of(st.text(max_size=8), st.integers(), st.lists(st.sampled_from(["{", "}", '"', "\\", "]"]), max_size=4)),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.from_regex(r"[a-z_.-]{1,12}", fullmatch=True), ARGUMENTS), min_size=1, max_size=3)
FORMATS = ["HERMES", "LIST", "MISTRAL", "TIGHT", "NAMED", "NAMED_WITH_ID", "LLAMA3"]
PROSE = st.text(st.sampled_from("ab <tool_cal[TOOL_CALLS]\n"), max_size=20)

FEW = settings(max_examples=50, deadline=None)


def known(template: str) -> ToolFormat:
    form = detect_tool_format(template)
    assert form is not None
    return form


def parsed(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """The content, the name and arguments of each call, and the number of complete calls."""
    parser = ToolParser(form)
    content, calls = "", list[tuple[str, str]]()
    found: list[ToolCallDelta] = []
    for text in pieces:
        got = parser.add(text)
        content += got.content
        found += got.calls
    content += parser.finish().content
    for piece in found:
        if piece.id is not None:
            assert piece.index == len(calls)
            calls.append((piece.name or "", ""))
        name, arguments = calls[piece.index]
        calls[piece.index] = (name, arguments + piece.arguments)
    return content, calls, parser.num_calls


def written(form: ToolFormat, name: str, arguments: str) -> str:
    """One call as the model writes it, between its markers."""
    if form.name_end:
        call_id = f"{form.id_begin}a1B2c3D4e" if form.id_begin else ""
        return f"{name}{call_id}{form.name_end}{arguments}"
    return f'{{"name": "{name}", "{form.arguments}": {arguments}}}'


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", FORMATS)
@FEW
@given(calls=CALLS, prose=PROSE, places=st.lists(st.integers(0, 500), max_size=30))
def test_any_cut_gives_the_same_calls(
    name: str, calls: list[tuple[str, object]], prose: str, places: list[int]
) -> None:
    """Any cut of an answer gives the same content and calls with their arguments as written."""
    form = known(getattr(tool_templates, name))
    if form.between is None:
        calls, prose = calls[:1], ""
    if form.begin and form.begin in prose:
        prose = ""
    texts = [json.dumps(arguments) for _, arguments in calls]
    objects = [written(form, name, text) for (name, _), text in zip(calls, texts, strict=True)]
    answer = prose + form.begin + form.opening + (form.between or "").join(objects) + form.closing
    content, found, whole = parsed(form, cut(answer, places))
    assert content == (prose if prose.strip() else "")
    assert found == [(called, text) for (called, _), text in zip(calls, texts, strict=True)]
    assert whole == len(calls)


@pytest.mark.parametrize("name", FORMATS)
@FEW
@given(prose=PROSE, places=st.lists(st.integers(0, 500), max_size=30))
def test_text_without_calls_is_text(name: str, prose: str, places: list[int]) -> None:
    """Text without calls is returned unchanged, an unfinished marker at its end included."""
    form = known(getattr(tool_templates, name))
    if form.begin and form.begin in prose:
        return
    content, calls, _ = parsed(form, cut(prose, places))
    assert content == prose
    assert calls == []


def test_a_call_that_is_cut_off_is_not_whole() -> None:
    """A call that is cut off gives the arguments so far and is not complete; a cut name gives nothing."""
    form = known(tool_templates.HERMES)
    assert parsed(form, ['<tool_call>\n{"name": "f", "arguments": {"a": "}']) == ("", [("f", '{"a": "}')], 0)
    assert parsed(form, ['<tool_call>\n{"name": "weat']) == ("", [], 0)


def test_calls_with_the_name_before_the_arguments_are_parsed() -> None:
    """The named format's calls are parsed without white space and ids, and a marker inside arguments is text."""
    form = known(tool_templates.NAMED)
    text = ' Look:[TOOL_CALLS]f[ARGS] {"a": "[TOOL_CALLS]g[ARGS]{"}\n[TOOL_CALLS] g [CALL_ID]a1B2c3D4e[ARGS]{}'
    assert parsed(form, [text]) == (" Look:", [("f", '{"a": "[TOOL_CALLS]g[ARGS]{"}'), ("g", "{}")], 2)
    assert parsed(form, list(text)) == parsed(form, [text])
    assert parsed(form, ["[TOOL_CALLS]f[AR"]) == ("", [], 0)
    assert parsed(form, ['[TOOL_CALLS]f[ARGS]{"a"', ": 1}[TOOL_CALLS]g"]) == ("", [("f", '{"a": 1}')], 1)
    assert parsed(form, ["[TOOL_CALLS]f[ARGS]{}[TOOL_CAL"]) == ("", [("f", "{}")], 1)


def test_formats_are_detected_and_make_valid_ids() -> None:
    """A template's format is detected by its markers, and Mistral's ids have nine letters, as its template requires."""
    assert known(tool_templates.HERMES).closing == "\n</tool_call>"
    assert known(tool_templates.LIST).opening == "["
    assert re.fullmatch("[A-Za-z0-9]{9}", known(tool_templates.MISTRAL).new_id())
    assert known(tool_templates.MISTRAL).opening == " ["
    assert known(tool_templates.TIGHT).opening == "["
    assert known(tool_templates.NAMED).name_end == "[ARGS]"
    assert known(tool_templates.NAMED_WITH_ID).id_begin == "[CALL_ID]"
    assert re.fullmatch("[A-Za-z0-9]{9}", known(tool_templates.NAMED).new_id())
    assert known(tool_templates.LLAMA3).arguments == "parameters"
    assert known(tool_templates.HERMES).new_id() != known(tool_templates.HERMES).new_id()
    assert detect_tool_format(tool_templates.UNKNOWN) is None
