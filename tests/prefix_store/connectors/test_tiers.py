"""A connector over tiers that refuse writes, or that other programs have."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.prefix_store.connectors.conftest import Start
from tests.prefix_store.connectors.paged_engine.faults import wait_until
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of
from tests.prefix_store.mooncake_master import MooncakeMaster
from tests.prefix_store.tiers.full_disk import ANYWHERE, MOUNTED, Fault, folder, tmpfs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", [*ANYWHERE.values(), *MOUNTED.values()], ids=[*ANYWHERE, *MOUNTED])
def test_a_disk_that_refuses_writes_costs_only_what_it_would_have_kept(
    start: Start, tmp_path: Path, fault: Fault, depth: int
) -> None:
    """Prompts are answered, what it has is restored, and once it takes writes again, blocks are stored again."""
    place = tmp_path / "place"
    with ExitStack() as stack:
        stack.enter_context(tmpfs(place) if fault in MOUNTED.values() else folder(place))
        engine = start(disk=place / "kv", shares=False, depth=depth)
        kept, refused = prompt_of(37), prompt_of(37)
        engine.ask(kept)
        with fault(place):
            assert engine.ask(refused).loaded == 0
            assert engine.ask(kept).loaded == 36
            assert engine.ask(refused).loaded < 36
        wait_until(lambda: engine.ask(refused).loaded == 36)
        engine.close()


@pytest.fixture
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """Mooncake, for this test."""
    running = MooncakeMaster(tmp_path_factory.mktemp("mooncake"))
    running.start()
    yield running
    running.stop()


@pytest.mark.parametrize("depth", [1, 2])
def test_engines_meet_in_mooncake(start: Start, master: MooncakeMaster, depth: int) -> None:
    """What one has stored the other loads, and computes while Mooncake is gone: one call alone fails."""
    one, other = (start(mooncake=master.settings(), shares=False, depth=depth) for _ in range(2))
    prompt, late = prompt_of(37), prompt_of(37)

    def is_found() -> bool:
        return one.ask(prompt).loaded == other.ask(prompt).loaded == 36

    wait_until(is_found)
    master.stop()
    for engine in (one, other):
        for asked in (prompt, late) * 4:
            engine.ask(asked)
        tier = engine.workers.ranks[0].thread.value.store.tiers["mooncake"]
        # A look-up and a save may be under way at once; each save would fail, and wait some seconds, if it were tried.
        assert tier.counts.rejected["the store failed"] <= 9
        assert tier.counts.rejected["there is no connection"] >= 3 * 9
