"""Encryption of what is stored in Redis: AES-256-GCM of the package cryptography, with keys that can be replaced."""

import asyncio
import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from cache.errors import CorruptEntry, Undecryptable

_MAGIC = b"KGX1"
_KEY_BYTES = 32
_KEY_ID_BYTES = 4
_NONCE_BYTES = 12
_HEADER_BYTES = len(_MAGIC) + _KEY_ID_BYTES + _NONCE_BYTES
# Longer values take a thread: a processor without AES instructions needs a millisecond for them.
_LARGE_BYTES = 2**15


class Encryption(Protocol):
    """How values are written to Redis and read from there. `name` is their key in Redis."""

    async def seal(self, name: str, value: bytes) -> bytes:
        """What to store in place of a value."""

    async def open(self, name: str, stored: bytes) -> bytes:
        """The inverse of `seal`. Raises Undecryptable without the right key, CorruptEntry for damaged bytes."""


class NoEncryption:
    """Values are stored as they are."""

    async def seal(self, name: str, value: bytes) -> bytes:
        return value

    async def open(self, name: str, stored: bytes) -> bytes:
        if stored[: len(_MAGIC)] == _MAGIC:
            raise Undecryptable("stored bytes are encrypted, and there is no key")
        return stored


class AesGcm:
    """Magic, id of the key (4 bytes), nonce (12 random bytes), ciphertext with its tag (NIST SP 800-38D).

    The name of a value is authenticated with it, so a stored value is valid under its own name only. Values that are
    not encrypted are refused: whoever can write to Redis could have written them.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """`keys` are 32 bytes each as base64: the first encrypts, all decrypt. Raises ValueError for others."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # loaded only where values are encrypted

        raw = [_key(number, text) for number, text in enumerate(keys, start=1)]
        self._ciphers = {_key_id(key): AESGCM(key) for key in reversed(raw)}
        self._current = _key_id(raw[0])

    async def seal(self, name: str, value: bytes) -> bytes:
        return await _aside(len(value), self._seal, name.encode(), value)

    async def open(self, name: str, stored: bytes) -> bytes:
        return await _aside(len(stored), self._open, name.encode(), stored)

    def _seal(self, name: bytes, value: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return _MAGIC + self._current + nonce + self._ciphers[self._current].encrypt(nonce, value, name)

    def _open(self, name: bytes, stored: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        if stored[: len(_MAGIC)] != _MAGIC:
            raise Undecryptable("stored bytes are not encrypted, and a key is set")
        key_id, nonce = stored[len(_MAGIC) : len(_MAGIC) + _KEY_ID_BYTES], stored[_HEADER_BYTES - _NONCE_BYTES :]
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise Undecryptable(f"stored bytes are encrypted with another key ({key_id.hex()})")
        try:
            return cipher.decrypt(nonce[:_NONCE_BYTES], stored[_HEADER_BYTES:], name)
        except (InvalidTag, ValueError) as error:  # ValueError: too short to be anything
            raise CorruptEntry("stored bytes are damaged, or of another name") from error


def encryption_with(keys: Sequence[str]) -> Encryption:
    """Encryption with these keys, the first of which encrypts; none for no keys.

    Raises ValueError for a key that is none, and ImportError without the package cryptography.
    """
    return AesGcm(keys) if keys else NoEncryption()


async def _aside(size: int, work: Callable[[bytes, bytes], bytes], name: bytes, data: bytes) -> bytes:
    return await asyncio.to_thread(work, name, data) if size > _LARGE_BYTES else work(name, data)


def _key(number: int, text: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(f"key {number} is no base64 of 32 bytes, such as `openssl rand -base64 32` prints")
    return key


def _key_id(key: bytes) -> bytes:
    """Tells keys apart, and nothing about them."""
    return hashlib.blake2b(key, digest_size=_KEY_ID_BYTES, person=b"keepgate-key-id").digest()
