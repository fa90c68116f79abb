"""How a model is divided among ranks: layers over stages, heads, MLPs and vocabulary over the ranks of a stage.

A stage is divided as in Megatron-LM (arXiv 1909.08053): every rank has some heads and some of the MLP's inner features,
so each half of a layer ends with one sum over the ranks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from backend.errors import ModelError
from backend.models.config import ModelConfig
from backend.models.sizes import Precision, count_parameters, weight_bytes

_UNITS = (128, 64, 32, 16, 8, 4, 2)
"""Inner features of an MLP are divided in multiples of these: the most common sizes of groups that share a scale."""
_UNITS_PER_RANK = 4
"""So many units each rank should have at least, or its share is too far from what it should be."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one rank computes. Ranges are of the whole model's layers, heads, features and rows."""

    rank: int
    stage: int
    stages: int
    tensor_rank: int
    """Among the ranks of its stage."""
    tensor_ranks: int
    layers: range
    heads: range
    kv_heads: range
    """Those of ``heads``; where there are more ranks than KV heads, several ranks have the same one."""
    intermediate: range
    """Inner features of an MLP."""
    expert_intermediate: range
    """Inner features of every expert of a mixture; empty without one."""
    vocabulary: range
    """Rows of the embedding, in the first stage, and of the head, in the last one."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits."""
        return self.stage == self.stages - 1

    @property
    def title(self) -> str:
        """For messages, such as ``rank 3 (stage 2 of 2, part 2 of 2)``."""
        places = [("stage", self.stage, self.stages), ("part", self.tensor_rank, self.tensor_ranks)]
        return f"rank {self.rank} ({', '.join(f'{what} {at + 1} of {of}' for what, at, of in places if of > 1)})"

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model as its layers see it: their own numbers of layers, heads and inner features."""
        experts = config.experts
        if experts is not None:
            own_dense = frozenset(layer - self.layers.start for layer in experts.dense_layers if layer in self.layers)
            experts = replace(experts, intermediate_size=len(self.expert_intermediate), dense_layers=own_dense)
        own = slice(self.layers.start, self.layers.stop)
        return replace(
            config,
            num_layers=len(self.layers),
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
            windows=config.windows[own],
            ropes=config.ropes[own],
            experts=experts,
            # Which must not change when the heads or their number do.
            attention_scale=config.attention_scale or config.head_dim**-0.5,
        )


def part_bytes(config: ModelConfig, part: ModelPart, precision: Precision) -> int:
    """Bytes of one rank's weights, with what other ranks have too."""
    parameters = count_parameters(replace(part.config(config), vocab_size=len(part.vocabulary)))
    return weight_bytes(parameters, precision, has_embedding=part.is_first, has_head=part.is_last)


@dataclass(frozen=True, slots=True)
class Units:
    """Greatest common divisors of where the parts of a stage begin and end."""

    heads: int
    """In features: heads times ``head_dim``."""
    intermediate: int
    expert_intermediate: int
    """0 without a mixture."""


def common_units(config: ModelConfig, tensor_ranks: int) -> Units:
    """In what units the inputs of the last matrix of attention and MLPs are divided. Raises ModelError: `partition`."""
    parts = partition(config, tensor_ranks, 1)
    return Units(
        math.gcd(*(part.heads.stop * config.head_dim for part in parts)),
        math.gcd(*(part.intermediate.stop for part in parts)),
        math.gcd(*(part.expert_intermediate.stop for part in parts)),
    )


def partition(config: ModelConfig, tensor_ranks: int, stages: int) -> tuple[ModelPart, ...]:
    """The part of each rank; rank = stage * tensor_ranks + rank in the stage.

    Whole groups of heads that share a KV head stay together, so with 9 heads and 3 KV heads two ranks have 6 and 3
    heads; the MLP is then divided the other way, so that both have about as many weights. With more ranks than KV
    heads, a KV head's own heads are divided, and each of their ranks has that KV head.

    Raises:
        ModelError: there are more stages than layers, or more ranks in a stage than heads, inner features or rows.
    """
    if stages > config.num_layers:
        raise ModelError(
            f"--pipeline-parallel {stages}: this model has {config.num_layers} layers, expected at most as many stages"
        )
    heads = _divide_heads(config, tensor_ranks)
    intermediate = _divide_features(config.intermediate_size, config, heads)
    inner = config.experts.intermediate_size if config.experts else 0
    of_experts = _divide_features(inner, config, heads) if inner else [range(0)] * tensor_ranks
    vocabulary = _divide(config.vocab_size, tensor_ranks)
    group = config.num_heads // config.num_kv_heads
    return tuple(
        ModelPart(
            rank=stage * tensor_ranks + rank,
            stage=stage,
            stages=stages,
            tensor_rank=rank,
            tensor_ranks=tensor_ranks,
            layers=layers,
            heads=heads[rank],
            kv_heads=range(heads[rank].start // group, (heads[rank].stop - 1) // group + 1),
            intermediate=intermediate[rank],
            expert_intermediate=of_experts[rank],
            vocabulary=vocabulary[rank],
        )
        for stage, layers in enumerate(_divide_layers(config, stages))
        for rank in range(tensor_ranks)
    )


def _divide(count: int, parts: int) -> list[range]:
    """Consecutive ranges that differ by at most one in length; rank 0, which also samples, has a short one."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def _divide_layers(config: ModelConfig, stages: int) -> list[range]:
    """Layers of each stage; fewer for the last one, whose head counts as so many layers as have its weights."""
    parameters = count_parameters(config)
    head = parameters.embedding * config.num_layers / max(1, parameters.layers)
    layers, whole = config.num_layers, config.num_layers + head
    ends = [0]
    for stage in range(1, stages + 1):
        ends.append(min(max(round(whole * stage / stages), ends[-1] + 1), layers - (stages - stage)))
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def _divide_heads(config: ModelConfig, ranks: int) -> list[range]:
    """The heads of each rank of a stage; see `partition`."""
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if ranks <= kv_heads:
        return [range(part.start * group, part.stop * group) for part in _divide(kv_heads, ranks)]
    divided: list[range] = []
    for kv_head, sharing in enumerate(_divide(ranks, kv_heads)):
        if len(sharing) > group:
            raise ModelError(
                f"--tensor-parallel {ranks}: this model has {kv_heads} KV heads with {group} heads each, which so many "
                f"ranks cannot share; expected at most {config.num_heads}"
            )
        first = kv_head * group
        divided += [range(first + own.start, first + own.stop) for own in _divide(group, len(sharing))]
    return divided


def _divide_features(count: int, config: ModelConfig, heads: list[range]) -> list[range]:
    """Inner features of an MLP for each rank, fewer for a rank with more heads.

    A head has two matrices of ``head_dim`` (query and output) and its share of two (key and value), an inner feature
    three rows or columns.
    """
    ranks = len(heads)
    unit = next((unit for unit in _UNITS if count % unit == 0 and count // unit >= _UNITS_PER_RANK * ranks), 1)
    units = count // unit
    if units < ranks:
        raise ModelError(f"--tensor-parallel {ranks}: an MLP of this model has {count} inner features, expected more")
    per_head = 2 * config.head_dim * (1 + config.num_kv_heads / config.num_heads)
    active = config.experts.per_token if config.experts else 1
    whole = config.num_heads * per_head + 3 * count * active
    wanted = [max(0.0, (whole / ranks - len(own) * per_head) / (3 * unit * active)) for own in heads]
    scale = units / sum(wanted)
    ends, reached = [0], 0.0
    for rank, share in enumerate(wanted):
        reached += share * scale
        # At least one unit for this rank and for each one after it.
        ends.append(min(max(round(reached), ends[-1] + 1), units - (ranks - 1 - rank)))
    return [range(start * unit, stop * unit) for start, stop in itertools.pairwise(ends)]
