"""What a cache had of the requests that came."""

from dataclasses import dataclass

from prefix_store.replay.trace import TraceRequest


@dataclass(slots=True)
class Hits:
    """Counts of a replay. A hit is a leading block of a prompt that is there with all that comes before it."""

    block_tokens: int
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def count(self, request: TraceRequest, leading: int) -> None:
        """A request came, and so many of its first blocks were there."""
        self.blocks += len(request.keys)
        self.hit_blocks += leading
        self.tokens += request.input_length
        self.hit_tokens += min(leading * self.block_tokens, request.input_length)

    @property
    def ratios(self) -> dict[str, float]:
        """Shares of all blocks and of all prompt tokens; 0 where there are none."""
        return {
            "block_hit_ratio": self.hit_blocks / self.blocks if self.blocks else 0.0,
            "token_hit_ratio": self.hit_tokens / self.tokens if self.tokens else 0.0,
        }
