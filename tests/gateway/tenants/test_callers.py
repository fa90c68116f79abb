"""Who sends a request: keys that hold, and keys that do not, in every worker."""

import asyncio
import time
from typing import Any

import pytest
from multidict import CIMultiDictProxy

from cache.entries.key import namespace_for
from gateway.errors import CacheUnavailable, KeyRefused, KeyRequired
from gateway.settings.cache import CacheSettings
from gateway.settings.settings import Settings
from gateway.tenants.callers import Callers
from gateway.tenants.key_changes import KeyChanges, LimitChanges, NewKey, Rotation
from gateway.tenants.key_registry import Team
from gateway.tenants.virtual_key import Limits
from tests.cache.valkey import Valkey
from tests.gateway.tenants.conftest import Worker, Workers, headers
from tests.waiting import until


async def make_known(worker: Worker, secret: str) -> CIMultiDictProxy[str]:
    """Return the headers with a key when the worker knows it without asking."""
    given = headers(Authorization=f"Bearer {secret}")

    async def is_known() -> bool:
        return worker.callers.known(given) is await worker.callers.identify(given)

    await until(is_known)
    return given


async def is_refused(worker: Worker, secret: str) -> bool:
    try:
        await worker.callers.identify(headers(Authorization=f"Bearer {secret}"))
    except KeyRefused:
        return True
    return False


@pytest.mark.parametrize("name", ["Authorization", "x_api_key", "api_key", "lower case"])
async def test_a_key_is_found_in_each_header(workers: Workers, valkey: Valkey, name: str) -> None:
    """OpenAI's, Anthropic's and Azure's clients send it differently; afterwards nothing is waited for."""
    worker = await workers.start(valkey)
    key, secret = await worker.registry.create(NewKey(name="alice"))
    given = {
        "Authorization": headers(Authorization=f"Bearer {secret}"),
        "lower case": headers(Authorization=f"bearer {secret}"),
    }.get(name, headers(**{name: secret}))
    assert worker.callers.known(given) is None
    found = await worker.callers.identify(given)
    assert found.key == key

    async def is_known() -> bool:
        return worker.callers.known(given) is await worker.callers.identify(given)

    await until(is_known)
    assert secret not in repr(found)


async def test_a_request_without_a_key_is_refused(workers: Workers, valkey: Valkey) -> None:
    """The error says where a key is expected."""
    worker = await workers.start(valkey)
    with pytest.raises(KeyRequired, match="Authorization: Bearer KEY") as refused:
        await worker.callers.identify(headers())
    assert (refused.value.status, refused.value.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("case", ["unknown", "revoked", "expired", "no key", "two keys"])
async def test_all_invalid_keys_get_one_answer(workers: Workers, valkey: Valkey, raw: Any, case: str) -> None:
    """Nobody learns from the answer whether a key was ever one; Redis is asked the same each time."""
    worker = await workers.start(valkey)
    key, secret = await worker.registry.create(NewKey(name="alice", expires=time.time() + 0.6))
    await make_known(worker, secret)
    if case == "revoked":
        await worker.registry.revoke(key.id)
        await until(lambda: worker.callers.known(headers(Authorization=f"Bearer {secret}")) is None)
    if case == "expired":
        await until(lambda: time.time() > (key.expires or 0))
    given = {
        "unknown": headers(Authorization=f"Bearer {secret[:-1]}?"),
        "no key": headers(Authorization="Basic YTpi"),
        "two keys": headers(Authorization=f"Bearer {secret}", x_api_key="another"),
    }.get(case, headers(Authorization=f"Bearer {secret}"))

    async def asked() -> int:
        return int((await raw.info("commandstats"))["cmdstat_evalsha"]["calls"])

    before = await asked()
    with pytest.raises(KeyRefused) as refused:
        await worker.callers.identify(given)
    assert refused.value.message == "The key is not valid: it is unknown, revoked or expired."
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert await asked() - before in (1, 2)  # perhaps a heartbeat


async def test_a_revoked_key_is_refused_everywhere_soon(workers: Workers, valkey: Valkey) -> None:
    """Workers that know a key hear that it holds no more."""
    one, other = [await workers.start(valkey) for _ in range(2)]
    _, secret = await one.registry.create(NewKey(name="alice"))
    assert not await is_refused(one, secret)
    assert not await is_refused(other, secret)
    await one.registry.revoke("alice")

    await until(lambda: is_refused(other, secret), within=5.0)
    await until(lambda: is_refused(one, secret), within=5.0)


async def test_changes_of_keys_and_teams_reach_all_workers(workers: Workers, valkey: Valkey) -> None:
    """Limits of a key and its team are those that the operator set last."""
    one, other = [await workers.start(valkey) for _ in range(2)]
    await one.registry.set_team(Team(name="web", limits=Limits(tokens_per_minute=5)))
    key, secret = await one.registry.create(NewKey(name="alice", team="web"))
    given = headers(Authorization=f"Bearer {secret}")
    assert (await other.callers.identify(given)).key == key
    await one.registry.change(key.id, KeyChanges(limits=LimitChanges(requests_per_minute=7)))
    await one.registry.set_team(Team(name="web", limits=Limits(tokens_per_minute=6)))

    async def knows_both() -> bool:
        found = (await other.callers.identify(given)).key
        assert found is not None
        return (found.limits.requests_per_minute, found.team_limits.tokens_per_minute) == (7, 6)

    await until(knows_both, within=5.0)


async def test_a_rotated_key_has_a_grace_period(workers: Workers, valkey: Valkey) -> None:
    """The old secret holds for as long as the operator said, the new one from now on."""
    worker = await workers.start(valkey, known_for=0.1)
    key, first = await worker.registry.create(NewKey(name="alice"))
    rotated, second = await worker.registry.rotate("alice", Rotation(grace=1.0))
    assert not await is_refused(worker, first)
    assert not await is_refused(worker, second)
    await until(lambda: is_refused(worker, first), within=3.0)
    _, third = await worker.registry.rotate("alice", Rotation())

    assert await is_refused(worker, first)
    await until(lambda: is_refused(worker, second), within=5.0)
    assert not await is_refused(worker, third)
    assert rotated.id == key.id


async def test_a_former_secret_is_known_no_longer_than_its_grace_period(workers: Workers, valkey: Valkey) -> None:
    """However long a worker trusts what it knows of keys."""
    worker = await workers.start(valkey, known_for=60.0)
    _, first = await worker.registry.create(NewKey(name="alice"))
    await worker.registry.rotate("alice", Rotation(grace=1.0))
    await make_known(worker, first)
    await until(lambda: is_refused(worker, first), within=3.0)


async def test_a_former_secret_expires_with_its_key(workers: Workers, valkey: Valkey) -> None:
    """Also where the key was given an earlier end after its rotation."""
    worker = await workers.start(valkey)
    _, first = await worker.registry.create(NewKey(name="alice"))
    await worker.registry.rotate("alice", Rotation(grace=60.0))
    await worker.registry.change("alice", KeyChanges(expires=time.time() + 0.5))
    await until(lambda: is_refused(worker, first), within=3.0)


async def test_no_secret_outlives_its_key(workers: Workers, valkey: Valkey) -> None:
    """A grace period ends with the key."""
    worker = await workers.start(valkey, known_for=0.05)
    _, first = await worker.registry.create(NewKey(name="alice", expires=time.time() + 0.5))
    _, second = await worker.registry.rotate("alice", Rotation(grace=60.0))
    assert not await is_refused(worker, first)
    for secret in (first, second):
        await until(lambda secret=secret: is_refused(worker, secret), within=3.0)  # type: ignore[misc]


async def test_namespaces_are_the_keys_own_or_shared(workers: Workers, valkey: Valkey) -> None:
    """A new secret changes nothing of a key's namespace, and keys of one name share theirs."""
    worker = await workers.start(valkey)

    async def namespace(secret: str) -> str:
        return (await worker.callers.identify(headers(Authorization=f"Bearer {secret}"))).namespace

    _, own = await worker.registry.create(NewKey(name="own"))
    _, rotated = await worker.registry.rotate("own", Rotation(grace=60))
    _, other = await worker.registry.create(NewKey(name="other"))
    shared = [(await worker.registry.create(NewKey(name=name, namespace="web")))[1] for name in ("a", "b")]
    found = [await namespace(secret) for secret in (own, rotated, other, *shared)]

    assert found[0] == found[1]
    assert found[3] == found[4]
    assert len(set(found)) == 3
    assert all(len(each) == 20 for each in found)


async def test_without_keys_the_credential_is_the_tenant(valkey: Valkey) -> None:
    """Where no key is required, callers are told apart as the settings say, and nobody is asked."""
    callers = Callers(None, Settings(cache=CacheSettings(namespace="header:x-user")))
    found = callers.known(headers(x_user="me", Authorization="Bearer sk-1"))
    assert found is not None
    assert (found.namespace, found.credential, found.key) == (namespace_for("me"), "me", None)
    assert await callers.identify(headers()) == callers.known(headers())


# Redis away


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_open_serves_keys_that_are_known(workers: Workers, own_valkey: Valkey, fault: str) -> None:
    """With Redis away known keys hold until they expire; others cannot be checked, which is no refusal."""
    worker = await workers.start(own_valkey, known_for=0.05)
    _, lasting = await worker.registry.create(NewKey(name="alice"))
    expiring, brief = await worker.registry.create(NewKey(name="bob", expires=time.time() + 0.5))
    _, former = await worker.registry.create(NewKey(name="carol"))
    await worker.registry.rotate("carol", Rotation(grace=1.0))
    for secret in (lasting, brief, former):
        await worker.callers.identify(headers(Authorization=f"Bearer {secret}"))
    if fault == "killed":
        await own_valkey.kill()
    else:
        own_valkey.freeze()
    await asyncio.sleep(0.1)  # what is known is to be asked for again

    assert not await is_refused(worker, lasting)
    with pytest.raises(CacheUnavailable):
        await worker.callers.identify(headers(Authorization="Bearer sk-kg-unknown"))
    await until(lambda: time.time() > (expiring.expires or 0))
    assert await is_refused(worker, brief)
    await until(lambda: is_refused(worker, former))
    if fault == "frozen":
        own_valkey.thaw()


async def test_a_key_that_is_unknown_waits_for_redis(workers: Workers, own_valkey: Valkey) -> None:
    """A worker that has not met a key finds it though Redis has just been away for a moment."""
    worker = await workers.start(own_valkey)
    _, secret = await worker.registry.create(NewKey(name="alice"))
    worker.redis.breaker.trip(TimeoutError())
    assert not await is_refused(worker, secret)


async def test_closed_refuses_even_known_keys(workers: Workers, own_valkey: Valkey) -> None:
    """With Redis away `closed` answers 503, and the quick way knows nobody."""
    worker = await workers.start(own_valkey, without_redis="closed")
    _, secret = await worker.registry.create(NewKey(name="alice"))
    given = await make_known(worker, secret)
    await own_valkey.kill()
    await until(lambda: worker.redis.breaker.is_open)
    assert worker.callers.known(given) is None
    with pytest.raises(CacheUnavailable):
        await worker.callers.identify(given)
