"""The most hits that any cache could have, with knowledge of the future.

Belady's rule (IBM Systems Journal 5(2), 1966) with bypass: evicts the block that is used again last, even a new one.
For chains it is exact: a block is used again no later than its descendants, so the block that is used again last is
always a stored leaf.
"""

from __future__ import annotations

import heapq
from array import array

from prefix_store.eviction.tree import BlockTree
from prefix_store.replay.caches import Hits
from prefix_store.replay.trace import Trace

_NEVER = 2**62


class Belady:
    """A trace, prepared in two passes. Holds each request's path through the runs of the tree of all its blocks."""

    def __init__(self, trace: Trace, everything: BlockTree[int]) -> None:
        """`everything` has seen all requests and evicted nothing."""
        self._trace = trace
        numbers: dict[int, int] = {}
        self._lengths: list[int] = []
        self._parents: list[int] = []
        self._paths = array("q")
        self._ends = array("q")
        for request in trace.requests():
            parent = -1
            for run in everything.runs(request.keys):
                number = numbers.setdefault(id(run), len(numbers))
                if number == len(self._lengths):
                    self._lengths.append(len(run.keys))
                    self._parents.append(parent)
                self._paths.append(number)
                parent = number
            self._ends.append(len(self._paths))
        self._next_uses = self._find_next_uses()

    def _find_next_uses(self) -> array[int]:
        """For each step of each path, the number of the next request that uses that run."""
        following = [_NEVER] * len(self._lengths)
        found = array("q", bytes(8 * len(self._paths)))
        end = len(self._paths)
        for request in range(len(self._ends) - 1, -1, -1):
            begin = self._ends[request - 1] if request else 0
            for step in range(begin, end):
                run = self._paths[step]
                found[step] = following[run]
                following[run] = request
            end = begin
        return found

    def hits(self, capacity: int) -> Hits:
        """The hits of a cache of `capacity` blocks."""
        hits = Hits(self._trace.block_tokens)
        lengths, parents = self._lengths, self._parents
        stored = [0] * len(lengths)
        followers = [0] * len(lengths)
        next_use = [_NEVER] * len(lengths)
        latest: list[tuple[int, int]] = []
        size = begin = 0
        for request, end in zip(self._trace.requests(), self._ends, strict=True):
            path = self._paths[begin:end]
            leading = 0
            for run in path:
                leading += stored[run]
                if stored[run] < lengths[run]:
                    break
            hits.count(request, leading)
            for step, run in enumerate(path, begin):
                next_use[run] = self._next_uses[step]
                if not stored[run] and parents[run] >= 0:
                    followers[parents[run]] += 1
                size += lengths[run] - stored[run]
                stored[run] = lengths[run]
            if path and not followers[path[-1]]:
                heapq.heappush(latest, (-next_use[path[-1]], path[-1]))
            while size > capacity:
                use, run = latest[0]
                if not stored[run] or followers[run] or next_use[run] != -use:
                    heapq.heappop(latest)
                    continue
                blocks = min(stored[run], size - capacity)
                size -= blocks
                stored[run] -= blocks
                if not stored[run]:
                    heapq.heappop(latest)
                    parent = parents[run]
                    if parent >= 0:
                        followers[parent] -= 1
                        if not followers[parent]:
                            heapq.heappush(latest, (-next_use[parent], parent))
            begin = end
        return hits
