"""What a key allows beside its limits."""

import pytest

from cache.entries.key import namespace_for
from gateway.errors import ModelNotAllowed
from gateway.tenants.caller import Caller
from gateway.tenants.policies import check_model, priority_for, reads_cache, writes_cache
from gateway.tenants.virtual_key import CachePolicy, VirtualKey

ANYONE = Caller(namespace_for(""), "")


def with_key(models: tuple[str, ...] = (), cache: CachePolicy = "use", priority: int = 0) -> Caller:
    key = VirtualKey(id="key_1", name="alice", created=0.0, models=models, cache=cache, priority=priority)
    return Caller(namespace_for(key.tenant), key.tenant, key)


def test_a_model_that_is_not_on_the_list_is_refused() -> None:
    """The error lists those that are; a key without a list may use all."""
    check_model(ANYONE, "any")
    check_model(with_key(), "any")
    check_model(with_key(("small", "large")), "large")
    with pytest.raises(ModelNotAllowed, match=r"'alice' does not allow the model 'huge'\. It allows small") as no:
        check_model(with_key(("small", "large")), "huge")
    assert (no.value.status, no.value.code, no.value.param) == (403, "model_not_allowed", "model")
    with pytest.raises(ModelNotAllowed, match="m19 and 80 more"):
        check_model(with_key(tuple(f"m{number}" for number in range(100))), "huge")


@pytest.mark.parametrize(
    ("caller", "reads", "writes"),
    [
        (ANYONE, True, True),
        (with_key(), True, True),
        (with_key(cache="read-only"), True, False),
        (with_key(cache="bypass"), False, False),
    ],
)
def test_the_cache_policy_of_a_key(caller: Caller, reads: bool, writes: bool) -> None:
    """`read-only` stores nothing, `bypass` neither reads nor stores."""
    assert (reads_cache(caller), writes_cache(caller)) == (reads, writes)


def test_no_request_comes_before_its_key() -> None:
    """A client may lower the priority of a request, not raise it; lower numbers come first."""
    assert priority_for(ANYONE, -5) == -5
    assert priority_for(with_key(priority=3), 0) == 3
    assert priority_for(with_key(priority=3), 100) == 100
    assert priority_for(with_key(priority=-2), 0) == 0
