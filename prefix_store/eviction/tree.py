"""The state of a bounded tier: which blocks it has, their chains, and what it evicts when full."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic

from prefix_store.eviction.access import Access
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.run import K, Run

REMEMBERED_TURNOVERS = 8.0


class BlockTree(Generic[K]):
    """Chains of blocks; those with a common prefix share it. Holds keys, never bytes.

    A key identifies a block and its whole prefix, as a hash over (parent, tokens) does; chains are given from their
    first block on. A block is evicted only when no stored block follows it, so the stored blocks of a chain are its
    leading ones: `lookup` and `use` need a handful of look-ups for a chain of thousands of blocks. The nodes are runs
    of blocks with one history (as in a radix tree), so a use costs as much as the chain has branches, not blocks.

    Evicted blocks stay known until the capacity has been written `remembered` times: policies learn from those that
    return, and a one-shot's blocks are stored when they do. At most (1 + `remembered`) capacities of blocks are known
    but not stored, at about 140 bytes each.

    One thread uses it.
    """

    def __init__(self, capacity: int, policy: Policy, remembered: float = REMEMBERED_TURNOVERS) -> None:
        """`capacity` in the unit of the sizes given to `use`. Raises ValueError for one below 1."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1")
        if remembered < 0:
            raise ValueError(f"remembered is {remembered}, expected at least 0")
        self.capacity = capacity
        self.size = 0
        """What is stored, in the unit of the capacity."""
        self._policy = policy
        self._remembered = remembered
        self._root: Run[K] = Run([], 0, None)
        self._runs: dict[K, Run[K]] = {}
        self._count = 0
        self._turn = 0
        self._volume = 0.0
        # Ends of used chains by the volume of their last use, the oldest first: where forgetting begins.
        self._ends: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are stored."""
        return self._count

    def __contains__(self, key: K) -> bool:
        run = self._runs.get(key)
        return run is not None and (run.stored == len(run.keys) or key in run.keys[: run.stored])

    def __iter__(self) -> Iterator[K]:
        """The stored keys, parents before children."""
        for run in self._below(self._root):
            yield from run.keys[: run.stored]

    @property
    def known(self) -> int:
        """How many blocks are stored or remembered."""
        return len(self._runs)

    def lookup(self, keys: Sequence[K]) -> int:
        """How many of a chain's first blocks are stored. Changes nothing."""
        known = self._known(keys)
        if not known:
            return 0
        run = self._runs[keys[known - 1]]
        if run.stored:
            return min(known, run.depth + run.stored)
        while run.parent is not None and not run.stored:
            run = run.parent
        return run.depth + run.stored

    def runs(self, keys: Sequence[K]) -> list[Run[K]]:
        """The runs of a chain's known blocks, for inspection; the chain may end within the last one."""
        known = self._known(keys)
        run = self._runs[keys[known - 1]] if known else self._root
        return self._up_to(run)

    def use(self, keys: Sequence[K], access: Access, size: int = 1) -> list[K]:
        """Records a use of a chain, and stores its missing blocks (of a one-shot: those used before).

        Args:
            keys: the chain, from its first block on.
            access: the request.
            size: of each newly stored block, in bytes.

        Returns:
            The evicted keys, children before parents. Some may be of this chain, if the policy ranks them lowest or the
            chain is larger than all that may be evicted: they must not be stored.

        Raises:
            ValueError: the keys are not a chain, or the size is not positive.
        """
        if size < 1:
            raise ValueError(f"size is {size}, expected at least 1")
        if not keys:
            return []
        path = self._path(keys)
        missing = self._missing(keys, path)
        edge = next((run for run in reversed(path) if run.stored), None)
        if edge is not None and edge.place >= 0:
            self._policy.discard(edge)
        self._policy.on_use(path, access)
        self._turn += 1
        admit = True
        used: list[Run[K]] = []
        for run in path:
            again = run.access is not access
            admit = admit and (again or not access.one_shot or run.stored == len(run.keys))
            if again:
                run.uses += 1
                run.access = access
            run.turn = self._turn
            used += self._restore(run, size) if admit and run.stored < len(run.keys) else (run,)
        if missing:
            tail = used[-1] if used else self._root
            grown = self._grow(tail, missing, access, size, admit and not access.one_shot)
            if grown is not tail:
                used.append(grown)
        for run in used:
            run.volume = self._volume
        self._ends[keys[-1]] = self._volume
        self._ends.move_to_end(keys[-1])
        access.watch(self, keys[-1])
        gone = self._make_room(used)
        self._forget_old()
        return gone

    def pin(self, key: K) -> None:
        """Keeps a stored block and its ancestors until `unpin`. Raises KeyError if it is not stored.

        Pins are counted: each needs an `unpin`.
        """
        if key not in self:
            raise KeyError(key)
        run = self._ending_with(key)
        if run.place >= 0:
            self._policy.discard(run)
        run.pins += 1
        run.followers += 1

    def unpin(self, key: K) -> None:
        """Removes one `pin`. Raises KeyError if there is none, as after `remove`."""
        run = self._runs.get(key)
        if run is None or not run.pins or run.keys[-1] != key:
            raise KeyError(key)
        run.pins -= 1
        run.followers -= 1
        if run.may_shrink:
            self._policy.add(run)

    def remove(self, key: K) -> list[K]:
        """Forgets a block and its descendants, pinned or not.

        Returns:
            The keys that were stored, children before parents; empty if it was not known.
        """
        if key not in self._runs:
            return []
        run = self._runs[key]
        offset = run.keys.index(key)
        if offset:
            _, run = self._split(run, offset)
        before = run.parent
        gone: list[K] = []
        for lost in reversed(list(self._below(run))):
            gone += reversed(lost.keys[: lost.stored])
            self._drop_blocks(lost, lost.stored)
            self._forget(lost, 0)
        self._remember_end(before)
        return gone

    def on_access_end(self, access: Access, last: Any) -> None:
        """An access whose chain ended with the key `last` has its output length now."""
        run = self._runs.get(last)
        while run is not None and run.access is access:
            self._policy.on_access_end(run)
            run = run.parent

    def problems(self) -> list[str]:
        """Violated invariants, as sentences; empty if there are none."""
        found = []
        stored = size = known = 0
        for run in self._below(self._root):
            name = f"the run of {run.keys[:1]} to {run.keys[-1:]}"
            parent = run.parent
            stored += run.stored
            size += run.stored * run.size
            known += len(run.keys)
            if parent is None or run.depth != parent.end:
                found.append(f"{name} is not where its parent ends")
            elif run.stored and parent is not self._root and parent.stored < len(parent.keys):
                found.append(f"{name} is stored, what it follows is not")
            if not 0 <= run.stored <= len(run.keys) or not run.keys:
                found.append(f"{name} has {len(run.keys)} keys and stores {run.stored}")
            if run.pins and run.stored < len(run.keys):
                found.append(f"{name} is pinned and not stored")
            if run.followers != run.pins + sum(child.stored > 0 for child in run.children):
                found.append(f"{name} counts {run.followers} followers")
            if (run.place >= 0) != run.may_shrink:
                found.append(f"{name} is offered to the policy and may not shrink, or the reverse")
            if any(self._runs.get(key) is not run for key in run.keys):
                found.append(f"{name} has a key that does not lead to it")
            if parent is not None and parent is not self._root and parent.turn < run.turn:
                found.append(f"{name} was used later than what it follows")
        if (stored, size, known) != (self._count, self.size, len(self._runs)):
            counted = (self._count, self.size, len(self._runs))
            found.append(f"{(stored, size, known)} blocks stored, their size and those known are counted as {counted}")
        if self.size > self.capacity:
            found.append(f"the size is {self.size}, the capacity {self.capacity}")
        return found

    def _known(self, keys: Sequence[K]) -> int:
        """How many leading blocks of a chain are known. Bisection: a known block has a known parent."""
        runs = self._runs
        low, high = 0, len(keys)
        if high and keys[-1] in runs:
            return high
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in runs:
                low = middle + 1
            else:
                high = middle
        return low

    def _path(self, keys: Sequence[K]) -> list[Run[K]]:
        """The runs of a chain's known blocks, in order; splits the last one where the chain leaves it."""
        known = self._known(keys)
        if not known:
            return []
        run = self._runs[keys[known - 1]]
        offset = known - run.depth
        if not 0 < offset <= len(run.keys) or run.keys[offset - 1] != keys[known - 1]:
            raise ValueError(f"key {keys[known - 1]!r} is number {known} of the chain and was another number before")
        if offset < len(run.keys):
            run, _ = self._split(run, offset)
        return self._up_to(run)

    def _up_to(self, run: Run[K]) -> list[Run[K]]:
        """The runs of a chain that ends with this one, without the root."""
        path = []
        while run.parent is not None:
            path.append(run)
            run = run.parent
        path.reverse()
        return path

    def _missing(self, keys: Sequence[K], path: list[Run[K]]) -> list[K]:
        """The unknown keys of a chain, checked to be new."""
        missing = list(keys[path[-1].end if path else 0 :])
        fresh = set(missing)
        if len(fresh) < len(missing) or not self._runs.keys().isdisjoint(fresh):
            raise ValueError("a key of the chain stands in it twice, or followed another key before")
        return missing

    def _split(self, run: Run[K], offset: int) -> tuple[Run[K], Run[K]]:
        """Splits a run before key number `offset`; the smaller part becomes the new object."""
        offered = run.place >= 0
        if offered:
            self._policy.discard(run)
        new: Run[K] = Run([], run.depth, run.parent, run.size)
        new.access, new.turn, new.uses, new.volume, new.mark = run.access, run.turn, run.uses, run.volume, run.mark
        parent = run.parent
        if 2 * offset <= len(run.keys):
            upper, lower = new, run
            upper.keys, lower.keys = run.keys[:offset], run.keys[offset:]
            if parent is not None:
                parent.children.remove(lower)
                parent.children.add(upper)
        else:
            upper, lower = run, new
            upper.keys, lower.keys = run.keys[:offset], run.keys[offset:]
            lower.children, lower.pins, lower.followers = run.children, run.pins, run.followers
            for child in lower.children:
                child.parent = lower
            upper.pins = 0
        lower.parent, lower.depth = upper, upper.end
        upper.children = {lower}
        stored = run.stored
        upper.stored, lower.stored = min(stored, offset), max(0, stored - offset)
        upper.followers = int(lower.stored > 0)
        self._runs.update(dict.fromkeys(new.keys, new))
        for part in (upper, lower):
            if offered and part.may_shrink:
                self._policy.add(part)
        return upper, lower

    def _restore(self, run: Run[K], size: int) -> tuple[Run[K], ...]:
        """Stores the rest of a run whose parent is stored. Returns it, or its two parts if their sizes differ."""
        if run.stored and run.size != size:
            upper, lower = self._split(run, run.stored)
            return upper, *self._restore(lower, size)
        if not run.stored:
            self._gain_follower(run.parent)
        blocks = len(run.keys) - run.stored
        run.size, run.stored = size, len(run.keys)
        self._note_written(blocks, size)
        self._count += blocks
        self.size += blocks * size
        return (run,)

    def _grow(self, tail: Run[K], keys: list[K], access: Access, size: int, store: bool) -> Run[K]:
        """Appends new blocks to a chain, and stores them if `store`. Returns their run."""
        blocks = len(keys)
        continues = tail.access is access and tail.uses == 1 and tail.size == size and not tail.children
        if tail is not self._root and continues and not tail.pins and (tail.stored == len(tail.keys)) == store:
            run = tail
            run.keys += keys
        else:
            run = Run(keys, tail.end, tail, size, access=access, turn=self._turn, uses=1)
            tail.children.add(run)
            if store:
                self._gain_follower(tail)
        self._runs.update(dict.fromkeys(keys, run))
        self._note_written(blocks, size)
        if store:
            run.stored += blocks
            self._count += blocks
            self.size += blocks * size
        self._policy.on_insert(run, blocks)
        return run

    def _note_written(self, blocks: int, size: int) -> None:
        self._volume += blocks * size / self.capacity

    def _gain_follower(self, run: Run[K] | None) -> None:
        if run is not None:
            run.followers += 1
            if run.place >= 0:
                self._policy.discard(run)

    def _make_room(self, path: list[Run[K]]) -> list[K]:
        """Evicts tails until the rest fits. Offers the chain in use first; it may lose blocks, too."""
        own = next((run for run in reversed(path) if run.stored), None)
        if own is not None and own.may_shrink:
            self._policy.add(own)
        gone: list[K] = []
        while (over := self.size - self.capacity) > 0:
            run = self._policy.victim()
            if run is None:
                raise RuntimeError(f"{over} too much is stored and nothing may go")
            blocks = min(run.stored, -(-over // run.size))
            gone += reversed(run.keys[run.stored - blocks : run.stored])
            self._drop_blocks(run, blocks)
        return gone

    def _drop_blocks(self, run: Run[K], blocks: int) -> None:
        """Drops the last stored blocks of a run; they stay known."""
        if not blocks:
            return
        run.stored -= blocks
        self._count -= blocks
        self.size -= blocks * run.size
        if run.stored == 0:
            if run.place >= 0:
                self._policy.discard(run)
            parent = run.parent
            if parent is not None:
                parent.followers -= 1
                if parent.may_shrink:
                    self._policy.add(parent)
        if self._is_old(run.volume):
            self._ends[run.keys[-1]] = run.volume
            self._ends.move_to_end(run.keys[-1], last=False)

    def _is_old(self, volume: float) -> bool:
        return volume <= self._volume - self._remembered

    def _forget_old(self) -> None:
        """Forgets what is not stored and was last used too long ago, from the ends of chains."""
        while self._ends:
            key, volume = next(iter(self._ends.items()))
            if not self._is_old(volume):
                return
            del self._ends[key]
            run = self._runs.get(key)
            while run is not None and run is not self._root and not run.children and self._is_old(run.volume):
                parent = run.parent
                stored = run.stored
                if stored < len(run.keys):
                    self._forget(run, stored)
                run = None if stored else parent

    def _forget(self, run: Run[K], kept: int) -> None:
        """Forgets the keys of a run after the first `kept`; none is stored, and no run follows."""
        lost = run.keys[kept:]
        deque(map(self._runs.__delitem__, lost), maxlen=0)
        self._policy.on_forget(run, len(lost))
        del run.keys[kept:]
        if not kept and run.parent is not None:
            run.parent.children.remove(run)

    def _remember_end(self, run: Run[K] | None) -> None:
        """Remembers a chain that ends here, so that it is forgotten later."""
        if run is not None and run is not self._root and not run.children:
            self._ends.setdefault(run.keys[-1], run.volume)

    def _ending_with(self, key: K) -> Run[K]:
        run = self._runs[key]
        offset = run.keys.index(key) + 1
        return self._split(run, offset)[0] if offset < len(run.keys) else run

    def _below(self, run: Run[K]) -> Iterator[Run[K]]:
        """A run and its descendants, parents first; not the root."""
        waiting = [run]
        while waiting:
            run = waiting.pop()
            if run is not self._root:
                yield run
            waiting += run.children
