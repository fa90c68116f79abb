"""URLs of one server, of sentinels and of clusters."""

import pytest

from cache.stores.redis_url import InvalidRedisUrl, RedisUrl, parse_redis_url


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://user:p%40ss@h:1/3?client_name=x",
        "rediss://h:6380/0?ssl_ca_certs=/ca.pem",
        "unix:///run/redis.sock?db=1",
        "redis://[::1]:6379",
    ],
)
def test_a_url_of_one_server_is_kept_as_it_is(url: str) -> None:
    """The URL of a single server is the one that redis-py reads."""
    assert parse_redis_url(url) == RedisUrl("single", url)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        (
            "redis+sentinel://user:p%2Css@a,b:1,[::1]:2/main/3?read_from=replica&sentinel_password=x",
            RedisUrl(
                "sentinel",
                "redis://user:p%2Css@a:26379/3",
                (("a", 26379), ("b", 1), ("::1", 2)),
                "main",
                None,
                "x",
                True,
            ),
        ),
        (
            "rediss+sentinel://a/main?db=2&ssl_cert_reqs=none",
            RedisUrl("sentinel", "rediss://a:26379/2?ssl_cert_reqs=none", (("a", 26379),), "main"),
        ),
        ("redis+cluster://[::1],b:2", RedisUrl("cluster", "redis://[::1]:6379/", (("::1", 6379), ("b", 2)))),
        (
            "rediss+cluster://:pw@a:1/0?read_from=master&client_name=x",
            RedisUrl("cluster", "rediss://:pw@a:1/?client_name=x", (("a", 1),)),
        ),
    ],
)
def test_several_servers_are_read(url: str, parsed: RedisUrl) -> None:
    """Addresses, credentials, the master's name, the database and options are told apart."""
    assert parse_redis_url(url) == parsed


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://a,b", "expected one host; several are those of redis.sentinel:// or redis.cluster://"),
        ("redis://h/x", "expected the number of a database after the last slash, got 'x'"),
        ("redis://h?read_from=replica", "read_from belongs to redis.sentinel:// and redis.cluster://"),
        ("redis+sentinel://a", "expected the name of the master after the addresses"),
        ("redis+sentinel:///main", "address 1 is ''"),
        ("redis+sentinel://a,,b/main", "address 2 is ''"),
        ("redis+sentinel://a/main/x", "expected the number of a database after the master's name, got 'x'"),
        ("redis+sentinel://a:0/main", "address 1 is 'a:0'"),
        ("redis+cluster://a:99999", "address 1 is 'a:99999'"),
        ("redis+cluster://a:port", "address 1 is 'a:port'"),
        ("redis+cluster://a b", "address 1 is 'a b'"),
        ("redis+cluster://a/1", "expected no database: a cluster has number 0 alone; got '1'"),
        ("redis+cluster://a?db=1", "expected no database"),
        ("redis+cluster://a?read_from=nearest", "expected read_from=master or read_from=replica, got 'nearest'"),
        ("redis+cluster://a?sentinel_password=x", "the option 'sentinel_password' of the URL is unknown"),
        ("redis+cluster://a?retries=1", "the option 'retries' of the URL is unknown"),
        ("redis+cluster://a?password=x", "expected the password in front of the host"),
    ],
)
def test_a_malformed_url_is_refused_with_the_part_that_is_wrong(url: str, message: str) -> None:
    """The message names the part that is wrong, and what would be right."""
    with pytest.raises(InvalidRedisUrl, match=message):
        parse_redis_url(url)


@pytest.mark.parametrize(
    "url", ["", "h:6379", "http://h", "redis:h", "redis+x://h", "redis://", "unix://", "redis://h:p"]
)
def test_what_is_no_url_of_a_redis_is_refused(url: str) -> None:
    """Anything else is a ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011  # what is expected is for the caller to say
        parse_redis_url(url)
