"""Which requests share blocks: those whose tokens, salt and model are the same, and no others."""

from types import SimpleNamespace
from typing import Any

import pytest

from prefix_store.connectors.transfers import PartNames
from tests.prefix_store.connectors.conftest import Start
from tests.prefix_store.connectors.paged_engine.engine import Request
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of


def item_at(offset: int) -> Any:
    """An image in a prompt, as vLLM describes it."""
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset))


def test_salts_part_blocks(start: Start) -> None:
    """A prompt is found under the salt it was stored with, or stored without one."""
    engine = start(shares=False)
    prompt = prompt_of(21)
    salts = (None, "one", "other")
    assert [engine.ask(prompt, cache_salt=salt).loaded for salt in salts] == [0, 0, 0]
    assert [engine.ask(prompt, cache_salt=salt).loaded for salt in salts] == [20, 20, 20]
    assert engine.ask(prompt, cache_salt="").loaded == 20


def test_tenants_share_what_is_published(start: Start) -> None:
    """Its full blocks; what follows is each tenant's own."""
    engine = start(shares=False)
    prompt = prompt_of(21)
    engine.tenants.published.publish(prompt[:9])
    engine.ask(prompt, cache_salt="one")
    assert engine.ask(prompt, cache_salt="other").loaded == 8


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("lora", {"lora_request": SimpleNamespace(lora_name="adapter")}),
        ("prompt_embeds", {"prompt_embeds": [[0.5]]}),
        ("multimodal", {"mm_features": [item_at(3)]}),
    ],
)
def test_what_tokens_do_not_tell_is_neither_stored_nor_loaded(
    start: Start, reason: str, change: dict[str, Any]
) -> None:
    """Blocks of an adapter, of embeddings, or of an image in the first block; the engine is told of no tokens."""
    engine = start(shares=False)
    prompt = prompt_of(21)
    engine.ask(prompt)
    saves = engine.planned_saves
    request = engine.add(Request("other", prompt, **change))
    assert engine.side.matched_tokens(request, 0) == 0
    engine.preempt()
    engine.run()
    assert request.loaded == 0
    assert engine.planned_saves == saves
    assert engine.side.bypassed == {reason: 1}


def test_an_adapter_and_a_salt_of_one_name_are_apart(start: Start) -> None:
    """Neither finds what the other has computed, nor does one that has both."""
    engine = start(shares=False)
    prompt, adapter = prompt_of(21), SimpleNamespace(lora_name="name")
    for change in ({"lora_request": adapter}, {"cache_salt": "name"}, {"lora_request": adapter, "cache_salt": "name"}):
        assert engine.ask(prompt, **change).loaded == 0
    assert engine.ask(prompt, cache_salt="name").loaded == 20


def test_blocks_before_the_first_image_are_stored(start: Start) -> None:
    """Placeholders of another image are the same tokens, with other keys and values."""
    engine = start(shares=False)
    prompt = prompt_of(41)
    engine.ask(prompt, mm_features=[item_at(30), item_at(18)], max_tokens=9)
    assert engine.planned_saves == 4
    assert engine.ask(prompt).loaded == 16
    request = engine.ask(prompt, mm_features=[item_at(22)])
    assert request.loaded == 20


@pytest.mark.parametrize("equal", range(16, 25))
def test_a_block_is_shared_only_where_all_tokens_to_its_end_are(start: Start, equal: int) -> None:
    """The connector reads no hash of the engine's, whose units may be finer than blocks."""
    engine = start(shares=False)
    prompt = prompt_of(40)
    engine.ask(prompt)
    assert engine.ask(prompt[:equal] + prompt_of(16)).loaded == equal // 4 * 4


def test_a_block_is_shared_only_after_the_same_blocks(start: Start) -> None:
    """Equal tokens after other ones are another block."""
    engine = start(shares=False)
    prompt = prompt_of(40)
    engine.ask(prompt)
    assert engine.ask(prompt_of(4) + prompt[4:]).loaded == 0


def test_blocks_that_the_engine_has_overwritten_are_loaded(start: Start) -> None:
    """Of a prompt whose blocks were partly reused for another, what the engine still has is not loaded, the rest is."""
    prompt = prompt_of(41)
    start().ask(prompt)
    engine = start(blocks=20)
    engine.ask(prompt)
    engine.ask(prompt_of(53))
    request = engine.ask(prompt)
    assert request.shared + request.loaded == 40
    assert request.loaded >= 20


def test_models_share_nothing(start: Start) -> None:
    """Over one folder, a model finds its own blocks alone."""
    prompt = prompt_of(21)
    start(seed=1).ask(prompt)
    assert start(seed=2).ask(prompt).loaded == 0
    assert start(seed=1).ask(prompt).loaded == 20
    assert start(seed=2).ask(prompt).loaded == 20


def test_workers_of_other_parts_have_no_name_in_common(start: Start) -> None:
    """Nor has one worker before and after new weights."""
    blocks = start().chain(prompt_of(8))
    one, other = PartNames(b"1" * 16), PartNames(b"2" * 16)
    names = [[name.of(block) for block in blocks] for name in (one, other)]
    one.start_epoch()
    names.append([one.of(block) for block in blocks])
    assert len({name.key for part in names for name in part}) == 6
    for first, second in names:
        assert second.parent == first.key
        assert second.tokens == blocks[1].tokens
