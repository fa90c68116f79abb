"""One judgement of a cached answer: the only thing that policies learn from, and small enough to travel."""

from typing import Annotated, Literal

import msgspec

from cache.semantic.policy.state import freeze, thaw

Source = Literal["miss", "audit", "user"]

_KIND = "label"
# Those of real evidence are below 15; with much larger ones a policy would reckon itself out of all bounds.
_MAX_FEATURE = 100.0
_Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Label(msgspec.Struct, frozen=True, array_like=True):
    """Whether the right answer to a question was the `answer` that the neighbours spoke for.

    `answer` and `features` are those of the evidence. `source` is how it was found: "miss" if nothing was served and
    the fresh answer could be compared, "audit" if it was compared although the answer was served, "user" if the user
    repeated it at once, or deleted the answer. `risk` is the decision's `plain_risk`, `chance` the probability with
    which an audit was drawn for it: an audited hit stands for 1 / chance hits. `judge` is how often who compared these
    very answers errs, recall and false same; None is as often as the policy was told.

    Raises ValueError where it could not have been.
    """

    answer: Annotated[str, msgspec.Meta(max_length=512)]
    features: Annotated[tuple[float, ...], msgspec.Meta(max_length=64)]
    same: bool
    source: Source
    risk: _Probability = 1.0
    chance: _Probability = 1.0
    judge: tuple[_Probability, _Probability] | None = None

    def __post_init__(self) -> None:
        if not all(abs(feature) <= _MAX_FEATURE for feature in self.features):
            raise ValueError(f"every feature must be within ±{_MAX_FEATURE:g}")
        if self.source == "audit" and self.chance <= 0.0:
            raise ValueError("an audit has a chance above 0")
        if self.judge is not None and not self.judge[1] < self.judge[0]:
            raise ValueError(f"a judge's recall is above its false_same, and not {self.judge}")


def encode_label(label: Label) -> bytes:
    """The label for other processes: about a hundred bytes."""
    return freeze(_KIND, label)


def decode_label(data: bytes) -> Label:
    """The inverse of `encode_label`. Raises UnusableState for anything else."""
    return thaw(data, _KIND, Label)
