"""The one process of a host that evicts: it reads what all of them say, and removes files so that the rest fits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from prefix_store.eviction.access import Access
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree
from prefix_store.tiers.disk.folder import Folder, StoredBlock
from prefix_store.tiers.disk.journal import JournalReader, Kind, Record, journals_in

# So many processes may write at a time; each may be a share of the room that is kept free ahead of the books.
WRITERS = 8
_MOST_AHEAD_BYTES = 64 * 2**20
_LIVENESS_SECONDS = 1.0
_RESCAN_SECONDS = 600.0
_OLD_SECONDS = 60.0
_OPEN_ACCESSES = 10_000


def bytes_ahead(capacity_bytes: int) -> int:
    """How many bytes of frames a process may write before the keeper has heard of them."""
    return min(capacity_bytes // 8 // WRITERS, _MOST_AHEAD_BYTES)


class Keeper:
    """The books of a folder. One thread uses it; it ends with `close`, or with its process.

    Everything it knows it has from the folder and from journals, so any process can go on where another one was
    killed. Together the files never have more bytes than the capacity: room for what `WRITERS` processes may write
    ahead of the books is kept free.
    """

    def __init__(
        self, folder: Folder, lock: int, capacity_bytes: int, policy: Policy, on_removed: Callable[[list[bytes]], None]
    ) -> None:
        """`lock` is a file descriptor, from `lock_of`, that is closed at the end. Raises OSError."""
        self.folder = folder
        self._lock = lock
        self._ahead = bytes_ahead(capacity_bytes)
        self._tree: BlockTree[bytes] = BlockTree(max(1, capacity_bytes - WRITERS * self._ahead), policy)
        self._on_removed = on_removed
        self._parents: dict[bytes, bytes] = {}
        self._readers: dict[str, JournalReader] = {}
        self._accesses: OrderedDict[tuple[str, int], Access] = OrderedDict()
        self._next_liveness = self._next_scan = 0.0

    def __len__(self) -> int:
        """Blocks in the books."""
        return len(self._parents)

    @property
    def used_bytes(self) -> int:
        """Of files in the books."""
        return self._tree.size

    def turn(self) -> None:
        """Hears what is new, and makes room. Raises OSError; then a new keeper has to begin from what is there."""
        now = time.monotonic()
        if now >= self._next_scan:
            self._scan()
            self._next_scan = now + _RESCAN_SECONDS
        for name in journals_in(self.folder.journals):
            if name not in self._readers:
                with contextlib.suppress(FileNotFoundError):
                    self._readers[name] = JournalReader(self.folder.journals / name)
        for name, reader in self._readers.items():
            self._hear(name, reader.read())
        if now >= self._next_liveness:
            self._next_liveness = now + _LIVENESS_SECONDS
            self._bury()
        for place, reader in enumerate(self._readers.values()):
            reader.tell(self._ahead if place < WRITERS else 0)

    def close(self) -> None:
        """Leaves the folder to another keeper."""
        for reader in self._readers.values():
            reader.close()
        os.close(self._lock)

    def problems(self) -> list[str]:
        """What is wrong with the books, in sentences; empty if all is well."""
        found = self._tree.problems()
        if set(self._tree) != set(self._parents):
            found.append(f"{len(self._tree)} blocks are in the tree and {len(self._parents)} have parents")
        return found

    def _scan(self) -> None:
        """Takes into the books what is in the folder, and nothing else; of chains, the one used last comes last."""
        stored = {block.key: block for block in self.folder.stored()}
        for key in [key for key in self._parents if key not in stored]:
            if not os.path.exists(self.folder.block(key, self._parents.get(key, key))):
                self._remove(self._tree.remove(key))
        fresh = {key: block for key, block in stored.items() if key not in self._parents}
        self._parents.update((key, block.parent) for key, block in fresh.items())
        ends = _ends(fresh)
        fits = self._newest_that_fit(fresh, ends)
        self._remove([key for key in fresh if key not in fits])
        for block in ends:
            if block.key in self._parents:
                self._use(block.key, Access(time.monotonic()), block.size)
        self._remove_old_drafts()

    def _newest_that_fit(self, fresh: Mapping[bytes, StoredBlock], ends: Sequence[StoredBlock]) -> set[bytes]:
        """Of blocks that are not in the books, whole chains, those used last first."""
        fits: set[bytes] = set()
        room = self._tree.capacity - self._tree.size
        for end in reversed(ends):
            chain, key = [], end.key
            while key in fresh and key not in fits:
                chain.append(key)
                key = fresh[key].parent
            room -= sum(fresh[key].size for key in chain)
            if room < 0:
                break
            fits.update(chain)
        return fits

    def _hear(self, journal: str, records: Sequence[Record]) -> None:
        """Takes records into the books. Blocks of one chain that were written together are admitted together."""
        written: Record | None = None
        for record in records:
            follows = (
                written is not None
                and record.kind is Kind.WROTE
                and (record.parent, record.number, record.access) == (written.key, written.number, written.access)
            )
            if written is not None and not follows:
                self._use(written.key, self._access(journal, written), written.number)
            written = None
            match record.kind:
                case Kind.WROTE if record.key not in self._parents:
                    self._parents[record.key] = record.parent
                    written = record
                case Kind.USED if record.key in self._parents:
                    access = self._access(journal, record)
                    self._use(record.key, access, 1)
                    if record.number >= 0 and access.output_length is None:
                        access.end(record.number)
                case Kind.ENDED:
                    if (ended := self._accesses.pop((journal, record.access), None)) and record.number >= 0:
                        ended.end(record.number)
                case Kind.GONE:
                    self._remove(self._tree.remove(record.key))
        if written is not None:
            self._use(written.key, self._access(journal, written), written.number)

    def _use(self, last: bytes, access: Access, size: int) -> None:
        """Notes that the chain which ends with a block was used, and that what is missing of it is there."""
        chain = [last]
        while (parent := self._parents[chain[-1]]) in self._parents:
            chain.append(parent)
        self._remove(self._tree.use(chain[::-1], access, size))

    def _access(self, journal: str, record: Record) -> Access:
        key = (journal, record.access)
        if key not in self._accesses:
            if len(self._accesses) >= _OPEN_ACCESSES:
                self._accesses.popitem(last=False)
            self._accesses[key] = Access(time.monotonic())
        return self._accesses[key]

    def _remove(self, keys: Sequence[bytes]) -> None:
        """Removes files, tails first. Who reads one of them goes on reading it."""
        gone = []
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.block(key, self._parents[key]))
            del self._parents[key]
            gone.append(key)
        if gone:
            self._on_removed(gone)

    def _bury(self) -> None:
        """Removes the journals of the dead, and what they had not finished."""
        left = [name for name, reader in self._readers.items() if reader.is_left()]
        for name in left:
            reader = self._readers.pop(name)
            self._hear(name, reader.read())
            reader.path.unlink(missing_ok=True)
            reader.close()
            for key in [key for key in self._accesses if key[0] == name]:
                del self._accesses[key]
        if left or any(reader.is_broken for reader in self._readers.values()):
            # One may have ended between a file and its record.
            self._scan()
            for reader in self._readers.values():
                reader.is_broken = False

    def _remove_old_drafts(self) -> None:
        writers = set(os.listdir(self.folder.journals))
        old = time.time() - _OLD_SECONDS
        for folder in (self.folder.drafts, self.folder.journals):
            for draft in os.scandir(folder):
                writer, dot, _ = draft.name.partition(".")
                is_fresh = draft.name.startswith("fresh.")
                if not dot or (writer in writers and not is_fresh):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if not is_fresh or draft.stat().st_mtime < old:
                        os.unlink(draft)


def _ends(blocks: Mapping[bytes, StoredBlock]) -> list[StoredBlock]:
    """Where uses of chains ended, the latest last: blocks that nothing follows, or that were used after what does."""
    later: dict[bytes, float] = {}
    for block in blocks.values():
        later[block.parent] = max(later.get(block.parent, 0.0), block.used)
    ends = [block for block in blocks.values() if block.key not in later or block.used > later[block.key]]
    return sorted(ends, key=lambda block: block.used)


def lock_of(folder: Folder) -> int | None:
    """The lock of a folder's keeper, as a file descriptor; None where another process has it. Raises OSError."""
    lock = os.open(folder.keeper, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock
