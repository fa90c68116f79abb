"""Evicts for all processes of a host: reads their journals, and removes files so that the rest fits the capacity."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from prefix_store.eviction.access import Access
from prefix_store.eviction.pins import Pins
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.folder import Folder, StoredBlock
from prefix_store.tiers.disk.folder_session import put_pin
from prefix_store.tiers.disk.journal import JournalReader, Kind, Record, journals_in
from prefix_store.tiers.disk.orphans import ORPHAN_SECONDS, Orphans
from prefix_store.tiers.disk.spares import Spares

# The number of processes that may write at a time; each has a share of the space that is kept free for them.
WRITERS = 8
_MAX_AHEAD_BYTES = 64 * 2**20
_LIVENESS_SECONDS = 1.0
_RESCAN_SECONDS = 600.0
_OLD_SECONDS = 60.0
_OPEN_ACCESSES = 10_000


def bytes_ahead(capacity_bytes: int) -> int:
    """Bytes of frames that a process may write before the evictor has read its journal."""
    return min(capacity_bytes // 8 // WRITERS, _MAX_AHEAD_BYTES)


class Evictor:
    """The eviction state of a folder. One thread uses it; it ends with `close`, or with its process.

    The state is rebuilt from the folder and the journals, so any process can take over from one that was killed. The
    files never exceed the capacity: space for what `WRITERS` processes may write ahead of their journals is kept free,
    orphans are charged to that space, and spare files are in the part of processes that do not write.
    """

    def __init__(
        self, folder: Folder, lock: int, capacity_bytes: int, policy: Policy, on_removed: Callable[[list[bytes]], None]
    ) -> None:
        """`lock` is a file descriptor, from `lock_evictor`, that is closed at the end. Raises OSError."""
        self.folder = folder
        self._lock = lock
        self._ahead = bytes_ahead(capacity_bytes)
        self._tree: BlockTree[bytes] = BlockTree(max(1, capacity_bytes - WRITERS * self._ahead), policy)
        self._pins = Pins(self._tree, capacity_bytes // 2)
        self._on_removed = on_removed
        self._names: dict[bytes, BlockName] = {}
        self._orphans = Orphans()
        self._spares = Spares(folder)
        self._readers: dict[str, JournalReader] = {}
        self._accesses: OrderedDict[tuple[str, int], Access] = OrderedDict()
        self._next_liveness = self._next_scan = 0.0
        self._pins_changed = True
        self._unknown_pins: dict[BlockName, float] = {}
        """Pins of unknown blocks, and since when (monotonic seconds)."""

    def __len__(self) -> int:
        """Number of known blocks."""
        return len(self._tree)

    @property
    def used_bytes(self) -> int:
        """Bytes of the files of known blocks."""
        return self._tree.size

    def turn(self) -> None:
        """Reads new journal records, and evicts. After an OSError a new evictor has to be made."""
        now = time.monotonic()
        if now >= self._next_scan:
            self._scan()
            self._next_scan = now + _RESCAN_SECONDS
        for name in journals_in(self.folder.journals):
            if name not in self._readers:
                with contextlib.suppress(FileNotFoundError):
                    self._readers[name] = JournalReader(self.folder.journals / name)
        # In the space of processes that do not write.
        self._spares.limit(max(0, WRITERS - len(self._readers)) * self._ahead)
        for name, reader in self._readers.items():
            self._apply_records(name, reader.read())
        self._place_orphans()
        if self._pins_changed or self._unknown_pins:
            self._pins_changed = False
            self._apply_pins()
        if now >= self._next_liveness:
            self._next_liveness = now + _LIVENESS_SECONDS
            self._reclaim_journals()
        self._write_progress()

    def _write_progress(self) -> None:
        """Writes to each journal how far it has been read, and how many bytes may be written beyond that."""
        waiting = self._orphans.bytes_by_journal()
        strange = sum(size for name, size in waiting.items() if name not in self._readers)
        share = -(-strange // WRITERS)
        for place, (name, reader) in enumerate(self._readers.items()):
            reader.write_progress(max(0, self._ahead - waiting[name] - share) if place < WRITERS else 0)

    def close(self) -> None:
        """Leaves the folder to another evictor."""
        for reader in self._readers.values():
            reader.close()
        os.close(self._lock)

    def problems(self) -> list[str]:
        """Violated invariants, as sentences; empty if there are none."""
        found = self._tree.problems()
        if set(self._tree) != set(self._names):
            found.append(f"{len(self._tree)} blocks are in the tree and {len(self._names)} have names")
        return found

    def _scan(self) -> None:
        """Makes the state agree with the folder; of chains, the one used last comes last."""
        stored = {block.name.key: block for block in self.folder.stored()}
        for key, name in list(self._names.items()):
            if key in self._names and key not in stored and not os.path.exists(self.folder.block(name)):
                self._remove(self._tree.remove(key))
        fresh = {key: block for key, block in stored.items() if key not in self._names and key not in self._orphans}
        # Pinned chains count as used last.
        ends = _ends(fresh) + [fresh[name.key] for name in self.folder.pinned() if name.key in fresh]
        fits = self._newest_that_fit(fresh, ends)
        self._unlink([block.name for key, block in fresh.items() if key not in fits and key not in self._orphans])
        self._pins_changed = True
        # Parents that were used long ago would be evicted for found blocks that are admitted before their children.
        for parent in {block.name.parent for block in fits.values() if not block.name.is_first} & self._names.keys():
            self._use(self._names[parent], Access(time.monotonic()), 1)
        for end in ends:
            self._admit(end, fits)
        self._remove_old_drafts()

    def _newest_that_fit(
        self, fresh: Mapping[bytes, StoredBlock], ends: Sequence[StoredBlock]
    ) -> dict[bytes, StoredBlock]:
        """Of unknown blocks, the complete chains that fit, those used last first; adds incomplete ones to the orphans.

        The space of known blocks counts as free: what a process writes while its folder is scanned is newer.
        """
        fits: dict[bytes, StoredBlock] = {}
        room = self._tree.capacity
        for end in reversed(ends):
            chain = [end]
            while not chain[-1].name.is_first and (parent := chain[-1].name.parent) in fresh and parent not in fits:
                if len(chain) > len(fresh):
                    break  # names that form a circle are no chain
                chain.append(fresh[parent])
            first = chain[-1].name
            if not (self._has_its_parent(first) or first.parent in fits):
                # The parent may have been written after its subfolder was listed.
                for block in chain:
                    self._orphans.add(block.name, block.size)
                continue
            new = [block for block in chain if block.name.key not in fits]
            room -= sum(block.size for block in new)
            if room < 0:
                break
            fits.update((block.name.key, block) for block in new)
        return fits

    def _admit(self, end: StoredBlock, fits: dict[bytes, StoredBlock]) -> None:
        """Admits a chain of found blocks, which are taken out of `fits`, and evicts what the policy names for it."""
        chain: list[StoredBlock] = []
        key = end.name.key
        while key in fits:
            chain.append(fits.pop(key))
            if chain[-1].name.is_first:
                break
            key = chain[-1].name.parent
        access = Access(time.monotonic())
        if not chain and key in self._names:
            self._use(end.name, access, end.size)
        for size, run in groupby(reversed(chain), lambda block: block.size):
            names = [block.name for block in run]
            if self._has_its_parent(names[0]):
                self._names.update((name.key, name) for name in names)
                self._use(names[-1], access, size)
            else:  # it was evicted for what was admitted before
                self._unlink(names[::-1])

    def _apply_records(self, journal: str, records: Sequence[Record]) -> None:
        """Applies journal records. Blocks of one chain that were written together are admitted together."""
        written: Record | None = None
        for record in records:
            name = record.name
            if written is not None and (record.kind, name.parent, record.number) != (
                Kind.WROTE,
                written.name.key,
                written.number,
            ):
                self._use(written.name, self._access(journal, written), written.number)
                written = None
            match record.kind:
                # A scan may have found and evicted it before its record was read.
                case Kind.WROTE if name.key not in self._names and os.path.exists(self.folder.block(name)):
                    if self._has_its_parent(name):
                        self._names[name.key] = name
                        written = record
                    elif self._has_lost_its_parent(name):
                        self._unlink([name])
                    else:
                        self._orphans.add(name, record.number, journal)
                case Kind.USED if name.key in self._names:
                    access = self._access(journal, record)
                    self._use(name, access, 1)
                    if record.number >= 0 and access.output_length is None:
                        access.end(record.number)
                case Kind.ENDED:
                    if (ended := self._accesses.pop((journal, record.access), None)) and record.number >= 0:
                        ended.end(record.number)
                case Kind.GONE:
                    self._remove(self._tree.remove(name.key))
                case Kind.PINNED:
                    self._pins_changed = True
                case Kind.CLEARED:
                    self._scan()
        if written is not None:
            self._use(written.name, self._access(journal, written), written.number)

    def _has_its_parent(self, name: BlockName) -> bool:
        return name.is_first or name.parent in self._names

    def _has_lost_its_parent(self, name: BlockName) -> bool:
        """Whether its parent was removed, and not written again by a process whose journal is read later.

        Such a block is not worth the wait: it would be charged to the space of its writer, which is about to write more
        of the same chain.
        """
        parent = self._orphans.removed_parent(name)
        return parent is not None and not os.path.exists(self.folder.block(parent))

    def _place_orphans(self) -> None:
        """Admits orphans whose parents are known by now; removes those whose time is up."""
        self._orphans.forget(self._names.keys())
        for orphan in self._orphans.pop_ready(self._has_its_parent):
            self._names[orphan.name.key] = orphan.name
            self._use(orphan.name, Access(time.monotonic()), orphan.size)
        self._unlink([orphan.name for orphan in self._orphans.expire()])

    def _apply_pins(self) -> None:
        """Applies the pins in the folder: removes those of missing blocks, shortens those beyond the limit."""
        pinned = {name.key: name for name in self.folder.pinned()}
        self._pins.unpin(list(self._pins.ends - pinned.keys()))
        self._unknown_pins = {name: since for name, since in self._unknown_pins.items() if name.key in pinned}
        for key in pinned.keys() - self._pins.ends:
            name = pinned[key]
            if key not in self._tree:
                # Its record may be in a journal that is read later.
                since = self._unknown_pins.setdefault(name, time.monotonic())
                if time.monotonic() - since > ORPHAN_SECONDS:
                    self._unpin(name)
                continue
            self._unknown_pins.pop(name, None)
            chain = self._chain_to(name)
            kept = self._pins.pin(chain, self._tree.runs(chain)[-1].size)
            if kept < len(chain):
                self._unpin(name)
                if kept:  # a full disk is no reason to stop evicting
                    with contextlib.suppress(OSError):
                        put_pin(self.folder, self._names[chain[kept - 1]])

    def _unpin(self, name: BlockName) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder.pin(name))

    def _chain_to(self, last: BlockName) -> list[bytes]:
        """The keys of the chain that ends with this block; all but the last are known."""
        chain = [last]
        while not chain[-1].is_first:
            chain.append(self._names[chain[-1].parent])
        return [name.key for name in reversed(chain)]

    def _use(self, last: BlockName, access: Access, size: int) -> None:
        """Records a use of the chain that ends with this block; admits its unknown blocks."""
        self._remove(self._tree.use(self._chain_to(last), access, size))

    def _access(self, journal: str, record: Record) -> Access:
        key = (journal, record.access)
        if key not in self._accesses:
            if len(self._accesses) >= _OPEN_ACCESSES:
                self._accesses.popitem(last=False)
            self._accesses[key] = Access(time.monotonic())
        return self._accesses[key]

    def _remove(self, keys: Sequence[bytes]) -> None:
        """Removes known blocks, tails first. What is being read may be written over, as its reader notices."""
        names = [self._names.pop(key) for key in keys]
        for name in names:
            if name.key in self._pins.ends:
                self._unpin(name)
        self._pins.forget(keys)
        self._unlink(names)

    def _unlink(self, names: Sequence[BlockName]) -> None:
        """Removes files, or makes them spare ones, and says so."""
        for name in names:
            self._spares.keep(name)
        self._orphans.note_removed(names)
        if names:
            self._on_removed([name.key for name in names])

    def _reclaim_journals(self) -> None:
        """Reads and removes the journals of ended processes."""
        left = [name for name, reader in self._readers.items() if reader.is_abandoned()]
        for name in left:
            reader = self._readers.pop(name)
            self._apply_records(name, reader.read())
            reader.path.unlink(missing_ok=True)
            reader.close()
            for key in [key for key in self._accesses if key[0] == name]:
                del self._accesses[key]
        if left or any(reader.is_broken for reader in self._readers.values()):
            # A process may have ended between writing a file and its record.
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
    """The blocks at which uses of chains ended, the latest last: leaves, and blocks used after their children."""
    later: dict[bytes, float] = {}
    for block in blocks.values():
        later[block.name.parent] = max(later.get(block.name.parent, 0.0), block.used)
    ends = [block for block in blocks.values() if block.used > later.get(block.name.key, 0.0)]
    return sorted(ends, key=lambda block: block.used)


def lock_evictor(folder: Folder) -> int | None:
    """The lock of a folder's evictor, as a file descriptor; None if another process has it. Raises OSError."""
    lock = os.open(folder.evictor, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock
