"""Keys and teams in Redis, the same for all workers and hosts.

A key is stored under the digest of its secret, never with the secret. All of it is in one hash slot of a cluster, so
that one script can read or write a key with its team. Every change sets a new version, which `Callers.follow` notices.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore
from gateway.errors import CacheUnavailable, InvalidRequest, NotFound
from gateway.tenants.key_changes import KeyChanges, NewKey, Rotation, merged_limits
from gateway.tenants.scripts import run_script
from gateway.tenants.virtual_key import NO_LIMITS, Limits, VirtualKey, digest_of, new_secret

_RECORDS = "keepgate:{keys}:records"  # a hash: id -> _Record
_NAMES = "keepgate:{keys}:names"  # a hash: name -> id, of keys that are not revoked
_TEAMS = "keepgate:{keys}:teams"  # a hash: name -> Limits
_VERSION = "keepgate:{keys}:version"  # a random text
_REQUEST_DEADLINE = 0.05
_OPERATOR_DEADLINE = 2.0
_MOST_TRIES = 5
_NEVER, _REMOVED = 0, -1

_encode = msgspec.json.Encoder().encode


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is stored; `digests` are of its present secret and of a former one that may still hold."""

    key: VirtualKey
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Write:
    """What becomes of a record: when each secret expires in Unix milliseconds, and whether its name becomes free."""

    record: _Record
    secrets: Mapping[str, int]
    frees_name: bool = False


class Team(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for all keys of a team together."""

    name: str
    limits: Limits


class KeyRegistry:
    """What an operator does with keys, and finding one. All but `find_by_secret` and `version` raise CacheUnavailable
    when Redis does not answer.
    """

    def __init__(self, redis: RedisStore) -> None:
        self._redis = redis

    async def find_by_secret(self, secret: str) -> VirtualKey | None:
        """The valid key with this secret, with its team's limits; one round trip. A former secret's key expires when
        the secret does. Raises StoreUnavailable.
        """
        keys = (_secret_key(digest_of(secret)), _RECORDS, _TEAMS)
        found = await run_script(self._redis, "find_key", keys, (), _REQUEST_DEADLINE)
        if not found:
            return None
        try:
            key = _decoded(found[0]).key
            team_limits = msgspec.json.decode(found[1], type=Limits) if found[1] else NO_LIMITS
        except msgspec.DecodeError as error:
            raise StoreUnavailable(f"redis: the record of a key is damaged: {error}") from error
        expires = found[2] / 1000 if found[2] != _NEVER else None
        return msgspec.structs.replace(key, team_limits=team_limits, expires=expires)

    async def version(self) -> bytes | None:
        """Another one after each change of a key or team. Raises StoreUnavailable."""
        version: bytes | None = await self._redis.command(("GET", _VERSION), _OPERATOR_DEADLINE)
        return version

    async def create(self, new: NewKey) -> tuple[VirtualKey, str]:
        """The key, and its secret, which nobody can read again. Raises InvalidRequest: the name is taken."""
        if new.team and new.team not in {team.name for team in await self.teams()}:
            raise InvalidRequest(
                f"There is no team {new.team!r}. Make it first: `keepgate keys teams {new.team}`, or"
                f" PUT /v1/teams/{new.team}.",
                param="team",
            )
        secret = new_secret()
        key = VirtualKey(
            id=f"key_{secrets.token_hex(8)}",
            name=new.name,
            team=new.team,
            created=time.time(),
            expires=new.expires,
            models=new.models,
            limits=new.limits,
            namespace=new.namespace,
            cache=new.cache,
            priority=new.priority,
        )
        digest = digest_of(secret)
        write = _Write(_Record(key=key, digests=(digest,)), {digest: _milliseconds(key.expires)})
        if await self._write(b"", write, "claim") == -1:
            raise InvalidRequest(f"There is a key with the name {new.name!r} already.", param="name")
        return await self._with_team(key), secret

    async def keys(self) -> list[VirtualKey]:
        """All keys, revoked ones too, by the time of their creation."""
        records = await self._read_hash(_RECORDS)
        teams = {team.name: team.limits for team in await self.teams()}
        keys = [_decoded(record).key for record in records.values()]
        return [
            msgspec.structs.replace(key, team_limits=teams.get(key.team, NO_LIMITS))
            for key in sorted(keys, key=lambda key: (key.created, key.id))
        ]

    async def get(self, id_or_name: str) -> VirtualKey:
        """Raises NotFound."""
        _, record = await self._read(id_or_name)
        return await self._with_team(record.key)

    async def change(self, id_or_name: str, changes: KeyChanges) -> VirtualKey:
        """The key with other rules. Raises NotFound, and InvalidRequest for a revoked one."""

        def changed(record: _Record) -> _Write:
            fields = {
                name: getattr(changes, name)
                for name in changes.__struct_fields__
                if name != "limits" and getattr(changes, name) is not msgspec.UNSET
            }
            limits = merged_limits(record.key.limits, changes.limits)
            key = msgspec.structs.replace(record.key, limits=limits, **fields)
            holds = {record.digests[0]: _milliseconds(key.expires)} if "expires" in fields else {}
            return _Write(_Record(key=key, digests=record.digests), holds)

        return await self._update(id_or_name, changed)

    async def rotate(self, id_or_name: str, rotation: Rotation) -> tuple[VirtualKey, str]:
        """The key with a new secret; the present one holds for the grace period. Raises as `change` does."""
        secret = new_secret()
        digest = digest_of(secret)

        def rotated(record: _Record) -> _Write:
            present, *former = record.digests
            expires = _milliseconds(record.key.expires)
            ends = round((time.time() + rotation.grace) * 1000) if rotation.grace else _REMOVED
            if expires != _NEVER and ends != _REMOVED:
                ends = min(ends, expires)
            holds = {digest: expires, present: ends, **dict.fromkeys(former, _REMOVED)}
            return _Write(_Record(key=record.key, digests=(digest, *((present,) if rotation.grace else ()))), holds)

        return await self._update(id_or_name, rotated), secret

    async def revoke(self, id_or_name: str) -> VirtualKey:
        """The key, which holds no more; its record stays, and its name is free. Raises as `change` does."""

        def revoked(record: _Record) -> _Write:
            key = msgspec.structs.replace(record.key, revoked=True)
            return _Write(_Record(key=key, digests=()), dict.fromkeys(record.digests, _REMOVED), frees_name=True)

        return await self._update(id_or_name, revoked)

    async def teams(self) -> list[Team]:
        """All teams, by name."""
        teams = await self._read_hash(_TEAMS)
        return [Team(name=name, limits=msgspec.json.decode(teams[name], type=Limits)) for name in sorted(teams)]

    async def team(self, name: str) -> Team:
        """Raises NotFound."""
        found = next((team for team in await self.teams() if team.name == name), None)
        if found is None:
            raise NotFound(f"There is no team {name[:100]!r}.", param="name")
        return found

    async def set_team(self, team: Team) -> None:
        """Make a team, or replace its limits."""
        await self._command("HSET", _TEAMS, team.name, _encode(team.limits))
        await self._command("SET", _VERSION, secrets.token_hex(8))

    async def _update(self, id_or_name: str, make_write: Callable[[_Record], _Write]) -> VirtualKey:
        key_id, tried = id_or_name, b""
        for _ in range(_MOST_TRIES):
            read, record = await self._read(key_id)
            if read == tried:  # it was written, and only the reply was lost
                return await self._with_team(record.key)
            if record.key.revoked:
                raise InvalidRequest(f"The key {record.key.name!r} is revoked.", param="id", code="key_revoked")
            write = make_write(record)
            key_id, tried = record.key.id, _encode(write.record)
            if await self._write(read, write, "free" if write.frees_name else "keep"):
                return await self._with_team(write.record.key)
        raise CacheUnavailable("The key is being changed by others; try again.")

    async def _write(self, read: bytes, write: _Write, claim: str) -> int:
        key = write.record.key
        keys = (_RECORDS, _NAMES, _VERSION, *map(_secret_key, write.secrets))
        arguments = (key.id, read, _encode(write.record), key.name, claim, secrets.token_hex(8))
        try:
            written: int = await run_script(
                self._redis, "write_key", keys, (*arguments, *write.secrets.values()), _OPERATOR_DEADLINE
            )
        except StoreUnavailable as error:
            raise _unavailable(error) from error
        return written

    async def _read(self, id_or_name: str) -> tuple[bytes, _Record]:
        """A record, and its bytes. Raises NotFound."""
        found = await self._command("HGET", _RECORDS, id_or_name)
        if found is None:
            named = await self._command("HGET", _NAMES, id_or_name)
            found = None if named is None else await self._command("HGET", _RECORDS, named)
        if found is None:
            raise NotFound(f"There is no key {id_or_name[:100]!r}.", param="id")
        return found, _decoded(found)

    async def _with_team(self, key: VirtualKey) -> VirtualKey:
        if not key.team:
            return key
        return msgspec.structs.replace(key, team_limits=(await self.team(key.team)).limits)

    async def _read_hash(self, name: str) -> dict[str, bytes]:
        flat = await self._command("HGETALL", name)
        return {field.decode(): value for field, value in zip(flat[::2], flat[1::2], strict=True)}

    async def _command(self, *words: str | bytes) -> Any:
        try:
            return await self._redis.command(words, _OPERATOR_DEADLINE)
        except StoreUnavailable as error:
            raise _unavailable(error) from error


def _secret_key(digest: str) -> str:
    return f"keepgate:{{keys}}:secret:{digest}"


def _decoded(record: bytes) -> _Record:
    return msgspec.json.decode(record, type=_Record)


def _milliseconds(expires: float | None) -> int:
    return _NEVER if expires is None else max(1, round(expires * 1000))


def _unavailable(error: StoreUnavailable) -> CacheUnavailable:
    return CacheUnavailable(f"Keys are kept in the shared store, which does not answer: {error}.")
