"""Redis nodes: each does one command after the other, and has the answers whose keys fall to it."""

from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.commands.simulation.figures import Figures
from gateway.commands.simulation.servers import Clock, Server

_MULTIPLIER = 0x9E3779B97F4A7C15
"""Knuth's multiplicative hash, of 64 bits: neighbours fall to different nodes."""


@dataclass(slots=True, eq=False)
class RedisNodes:
    """All nodes. Without any, every lookup is a miss that takes no time."""

    nodes: list[Server]
    capacity: int
    """Answers that one node holds."""
    figures: Figures
    clock: Clock
    entries: list[OrderedDict[int, None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries = [OrderedDict() for _ in self.nodes]

    def look_up(self, identity: int, knows_dead: set[str]) -> tuple[bool, float]:
        """Whether the answer is there, and when the worker knows. `knows_dead` are nodes for which it waits no more."""
        now = self.clock.now
        if not self.nodes:
            return False, now
        number = self._number(identity)
        node, entries = self.nodes[number], self.entries[number]
        if node.is_dead:
            if node.name in knows_dead:
                return False, now
            knows_dead.add(node.name)
            return False, now + self.figures.redis_deadline
        is_there = identity in entries
        if is_there:
            entries.move_to_end(identity)
        # A request of the worker arrives half a round trip later; that all of them do changes no queue.
        return is_there, node.serve(self.figures.redis_hit) + self.figures.round_trip

    def write(self, identity: int) -> None:
        """In the background: the lookup of a miss, which was counted, and what else it takes."""
        if self.nodes:
            number = self._number(identity)
            if not self.nodes[number].is_dead:
                self.nodes[number].serve(max(0.0, self.figures.redis_miss - self.figures.redis_hit))
                entries = self.entries[number]
                entries[identity] = None
                entries.move_to_end(identity)
                if len(entries) > self.capacity:
                    entries.popitem(last=False)

    def keep_up(self) -> None:
        """What one worker asks of the first node in a second, whatever its load."""
        if not self.nodes[0].is_dead:
            self.nodes[0].serve(self.figures.redis_worker)

    def note_memory_hit(self, identity: int) -> None:
        """In the background: its part of leases and totals."""
        if self.nodes and not (node := self.nodes[self._number(identity)]).is_dead:
            node.serve(self.figures.redis_memory_hit)

    def _number(self, identity: int) -> int:
        return (identity * _MULTIPLIER & 2**64 - 1) * len(self.nodes) >> 64
