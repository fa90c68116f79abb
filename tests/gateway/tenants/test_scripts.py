"""The scripts of limits by themselves, at times that a test says."""

import datetime
from typing import Any

import msgspec
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.tenants.scripts import script
from gateway.tenants.usage import Batch
from tests.cache.valkey import Valkey

_NOW = "test:now"
_KEYS = ("test:window", "test:slots", "test:spent", "test:reserved")


class Clocked:
    """The scripts, at the time `now` in seconds."""

    def __init__(self, valkey: Valkey) -> None:
        self.client = redis.Redis.from_url(valkey.url)
        self.client.flushall()
        self._calls = 0
        self._admit = self._timed("admit")
        self._settle = self._timed("settle")

    def _timed(self, name: Any) -> Any:
        source, _ = script(name)
        timed = source.replace("redis.call('TIME')", f"cjson.decode(redis.call('GET', '{_NOW}'))", 1)
        assert timed != source
        return self.client.register_script(timed)

    def admit(self, now: float, wanted: int, limits: tuple[int, ...], tokens: int = 0, money: int = 0) -> list[int]:
        self._set(now)
        self._calls += 1
        miss = (1, tokens, money, f"slot{self._calls}") if tokens else (0, 0, 0, "")
        return self.admit_again(wanted, miss, limits)

    def admit_again(self, wanted: int, miss: tuple[Any, ...], limits: tuple[int, ...]) -> list[int]:
        """The last call once more."""
        reply: list[int] = self._admit(keys=_KEYS, args=(1, wanted, *miss, 15_000, "turn", self._calls, *limits))
        return reply

    def give_back(self, now: float, second: int, permits: int, limits: tuple[int, ...]) -> None:
        self.settle(now, 1, limits, Batch(permits=[(second, permits)]))

    def settle(self, now: float, number: int, limits: tuple[int, ...], batch: Batch) -> None:
        """Deliver a batch under its number."""
        self._set(now)
        self._settle(keys=_KEYS, args=(1, msgspec.json.encode(batch), "w", number, 15_000, *limits))

    def sums(self) -> list[int]:
        """What was spent by day and month, with what is reserved."""
        found: list[Any] = self.client.hmget(_KEYS[2], "day_sum", "month_sum")
        return [int(each) for each in found]

    def reserved(self) -> list[str]:
        """What is reserved, the oldest first."""
        members: list[Any] = self.client.zrange(_KEYS[3], 0, -1)
        return [member.decode() for member in members]

    def _set(self, now: float) -> None:
        self.client.set(_NOW, f'["{int(now)}","{int(now % 1 * 1e6)}"]')


_steps = st.lists(
    st.tuples(st.one_of(st.floats(0, 3), st.floats(0, 90)), st.integers(1, 4), st.booleans()), min_size=1, max_size=60
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps, limit=st.integers(1, 8))
def test_no_minute_has_more_requests_than_the_limit(shared_valkey: Valkey, steps: Any, limit: int) -> None:
    """The permits used in any 60 seconds are within the limit, and after the wait that a refusal tells there is one."""
    clocked = Clocked(shared_valkey)
    limits = (limit, -1, -1, -1, -1)
    now = 1_800_000_000.0
    used: list[tuple[float, int]] = []
    for pause, wanted, gives_back in steps:
        now += pause
        reply = clocked.admit(now, wanted, limits)
        if reply[0] == 0:
            granted = reply[3]
            assert 1 <= granted <= wanted
            if gives_back and granted > 1:
                clocked.give_back(now, reply[1], granted - 1, limits)
                granted = 1
            used.append((now, granted))
        else:
            assert reply[:2] == [1, 1]
            assert 0 < reply[2] <= 61_000
            now += reply[2] / 1000 + 0.001
            again = clocked.admit(now, 1, limits)
            assert again[0] == 0
            used.append((now, 1))
        assert sum(count for at, count in used if at > now - 60) <= limit
    clocked.client.close()


def test_the_window_is_not_much_longer_than_a_minute(shared_valkey: Valkey) -> None:
    """What was used 61 seconds ago counts no more."""
    clocked = Clocked(shared_valkey)
    limits = (1, -1, -1, -1, -1)
    assert clocked.admit(1_800_000_000.9, 1, limits)[0] == 0
    assert clocked.admit(1_800_000_060.99, 1, limits)[0] == 1
    assert clocked.admit(1_800_000_061.0, 1, limits)[0] == 0
    clocked.client.close()


def test_a_series_that_ended_long_ago_does_not_end_the_other(shared_valkey: Valkey) -> None:
    """Hits go on after the last miss: their sum stays when a miss comes again."""
    clocked = Clocked(shared_valkey)
    limits = (100, 1_000, -1, -1, -1)
    now = 1_800_000_000
    assert clocked.admit(now, 1, limits, tokens=700)[0] == 0
    for second in range(0, 400, 20):
        assert clocked.admit(now + second, 1, limits)[0] == 0
    assert clocked.admit(now + 390, 1, limits, tokens=900)[:6] == [0, now + 390, (now + 390) // 86_400, 1, 4, 900]
    assert clocked.admit(now + 391, 1, limits, tokens=101)[:2] == [1, 2]
    clocked.client.close()


def test_a_clock_that_is_set_does_not_lock_anyone_out(shared_valkey: Valkey) -> None:
    """After a step of Redis' clock by an hour, back or forth, requests are admitted."""
    clocked = Clocked(shared_valkey)
    limits = (1, 10, -1, -1, -1)
    for now in (1_800_000_000, 1_800_003_600, 1_800_000_000, 1_800_900_000):
        assert clocked.admit(now, 1, limits, tokens=10)[0] == 0
        assert clocked.admit(now, 1, limits, tokens=10)[0] == 1
    clocked.client.close()


def test_months_are_those_of_the_calendar(shared_valkey: Valkey) -> None:
    """Each day belongs to its month, and a refusal by the month waits for the first of the next."""
    clocked = Clocked(shared_valkey)
    limits = (-1, -1, -1, -1, 10)
    day = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
    while day.year < 2033:
        clocked.client.delete(*_KEYS[2:])
        now = day.timestamp() + 3_600
        assert clocked.admit(now, 1, limits, tokens=1, money=10)[0] == 0
        refused, which, wait, used = clocked.admit(now, 1, limits, tokens=1, money=1)
        assert (refused, which, used) == (1, 5, 10)
        first = (day.replace(day=1) + datetime.timedelta(days=32)).replace(day=1)
        assert wait == (first.timestamp() - now) * 1000
        assert clocked.client.hget(_KEYS[2], "month") == str(12 * day.year + day.month).encode()
        day += datetime.timedelta(days=5)
    clocked.client.close()


def test_a_call_that_comes_twice_counts_once(shared_valkey: Valkey) -> None:
    """Its second reply is as good as the first, though the limit is reached by then."""
    clocked = Clocked(shared_valkey)
    limits = (2, 5, 1, 100, 100)
    first = clocked.admit(1_800_000_000, 1, limits, tokens=5, money=100)
    assert first == [0, 1_800_000_000, 20_833, 1, 1, 5, 100, 100]
    assert clocked.admit_again(1, (1, 5, 100, "slot1"), limits) == first
    assert clocked.admit(1_800_000_000, 1, limits)[3:5] == [1, 2]
    assert clocked.admit(1_800_000_000, 1, limits)[:2] == [1, 1]
    clocked.client.close()


def test_a_batch_that_comes_twice_counts_once(shared_valkey: Valkey) -> None:
    """Tokens beyond a reservation, permits that come back and money are told by the number of their batch."""
    clocked = Clocked(shared_valkey)
    limits = (10_000, 10_000, -1, 100, -1)
    now = 1_800_000_000
    for _ in range(2):
        granted = clocked.admit(now, 4, limits, tokens=5, money=0)
        assert granted[3] == 4
    batch = Batch(tokens=[(now, 5, 3), (now, 5, 9)], permits=[(now, 3)], money=[("none", 7)])
    for number in (1, 1, 2, 1):
        clocked.settle(now, number, limits, batch)
    assert clocked.admit(now, 1, limits, tokens=1)[4:7] == [8 - 2 * 3 + 1, 40 + 2 * (9 - 5 - (5 - 3)) + 1, 2 * 7]
    clocked.client.close()


def test_large_sums_of_money_stay_exact(shared_valkey: Valkey) -> None:
    """A budget of a million dollars is kept to the nano-dollar."""
    clocked = Clocked(shared_valkey)
    limit = 10**15
    limits = (-1, -1, -1, limit, limit)
    assert clocked.admit(1_800_000_000, 1, limits, tokens=1, money=limit - 1)[6:] == [limit - 1, limit - 1]
    assert clocked.admit(1_800_000_000, 1, limits, tokens=1, money=2)[0] == 1
    assert clocked.admit(1_800_000_000, 1, limits, tokens=1, money=1)[6:] == [limit, limit]
    clocked.client.close()


_events = st.lists(
    st.tuples(st.sampled_from(["admit", "settle", "die", "renew", "again", "wait"]), st.integers(0, 99)), max_size=40
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=_events)
def test_reservations_of_the_dead_end_and_others_last(shared_valkey: Valkey, events: list[tuple[str, int]]) -> None:
    """Whatever happens in whatever order, the sums are what was used and what living requests have reserved."""
    clocked = Clocked(shared_valkey)
    limits = (-1, -1, -1, 10**9, 10**9)
    now, number, spent = 1_800_000_000.0, 0, 0
    living: dict[str, int] = {}
    dying: dict[str, tuple[float, int]] = {}
    last = Batch()
    for event, amount in events:
        if event == "admit":
            before = set(clocked.reserved())
            assert clocked.admit(now, 1, limits, tokens=1, money=amount + 1)[0] == 0
            (text,) = set(clocked.reserved()) - before
            living[text] = amount + 1
        elif event == "settle" and living:
            last, number = Batch(money=[(next(iter(living)), amount)]), number + 1
            del living[next(iter(living))]
            spent += amount
            clocked.settle(now, number, limits, last)
        elif event == "die" and living:
            text = next(iter(living))
            dying[text] = (now + 15, living.pop(text))
        elif event == "again":
            clocked.settle(now, number, limits, last)
        elif event in ("renew", "wait"):
            now += amount / 4
            if event == "renew":
                last, number = Batch(held=list(living)), number + 1
                clocked.settle(now, number, limits, last)
    for wait in (0, 15):
        now += wait
        clocked.settle(now, number := number + 1, limits, Batch(held=list(living)))
        assert clocked.admit(now, 1, limits, tokens=1)[0] == 0
        held = dict(living) | {text: amount for text, (until, amount) in dying.items() if text in clocked.reserved()}
        assert set(held) == set(clocked.reserved())
        assert all(until > now for text, (until, _) in dying.items() if text in held)
        assert clocked.sums() == [spent + sum(held.values())] * 2
    assert held == living
    clocked.client.close()
