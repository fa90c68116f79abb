"""Computes one decoder layer over whole sequences in parts, so that callers can read its linear layers' inputs.

`backend.runners.torch.runner` is the same decoder over paged memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from backend.checkpoints.tensor_store import TensorStore
from backend.model_loader.weights import LayerWeights, Linear, Mlp
from backend.models.config import ModelConfig
from backend.models.rope import rotations

Group = Literal["qkv", "o", "gate_up", "down"]
"""Linear layers with one input, which runners fuse."""
GROUPS: tuple[Group, ...] = ("qkv", "o", "gate_up", "down")

Q, K, V, O = (f"self_attn.{part}_proj" for part in "qkvo")  # noqa: E741 - the names that the field gives them


@dataclass(slots=True)
class DenseLinear:
    """A linear layer in float32, whose weight may be changed: weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names of an MLP's three linear layers within their decoder layer."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Rows:
    """Input rows of one MLP: all rows, or those routed to this expert."""

    names: MlpNames
    which: torch.Tensor | None
    """int64 [n], indices of rows; None: all."""
    shares: torch.Tensor | None
    """float32 [n, 1], routing weights; None: all are 1."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its rows of x [T, hidden]."""
        return x if self.which is None else x[self.which]


class DecoderLayer:
    """Computes in float32; sequences are [B, T, hidden], all of one length and each from its first token.

    Attributes:
        linears: by Hugging Face's names within a layer, such as ``mlp.down_proj``.
        norms: float32 vectors by ``input`` (before attention) and ``mlp`` (before the MLP).
        router: float32 [experts, hidden], or None.
        mlps: names of the MLP, or of each expert's.
    """

    def __init__(self, config: ModelConfig, index: int, weights: LayerWeights, expert_names: ExpertNames) -> None:
        self.index = index
        self._config = config
        self._experts = config.layer_experts(index)
        self._rope = config.rope(index)
        self._window = config.window(index)
        self.norms = {"input": weights.input_norm.float(), "mlp": weights.post_attention_norm.float()}
        self._weights = weights
        self.router = None if weights.router is None else weights.router.float()
        self.mlps = expert_names.of_layer(weights)
        self.linears = dict(_attention_linears(weights))
        for names, mlp in zip(self.mlps, weights.mlps, strict=True):
            self.linears.update(_mlp_linears(names, mlp))

    @property
    def shares_heads(self) -> bool:
        """Whether query heads share value heads (GQA)."""
        return self._config.num_heads != self._config.num_kv_heads

    def group(self, group: Group) -> list[tuple[str, ...]]:
        """Names of the linear layers of a group; those in one tuple have the same input."""
        match group:
            case "qkv":
                return [(Q, K, V)]
            case "o":
                return [(O,)]
            case "gate_up":
                return [(mlp.gate, mlp.up) for mlp in self.mlps]
            case "down":
                return [(mlp.down,) for mlp in self.mlps]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The whole layer: [B, T, hidden] to the same."""
        hidden = self.add_attention(hidden, self.attend(self.attention_input(hidden)))
        normed = self.mlp_input(hidden)
        return self.add_mlp(hidden, normed, self.routed(normed))

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the QKV projections: [B, T, hidden]."""
        return self._norm(hidden, self.norms["input"])

    def attend(self, normed: torch.Tensor) -> torch.Tensor:
        """Input of the output projection: [B, T, heads * head_dim]."""
        c, (batch, length, _) = self._config, normed.shape
        query, key, value = (self.linears[name](normed).view(batch, length, -1, c.head_dim) for name in (Q, K, V))
        if self._weights.query_norm is not None and self._weights.key_norm is not None:
            query, key = self._norm(query, self._weights.query_norm), self._norm(key, self._weights.key_norm)
        if self._rope is not None:
            angles = rotations(self._rope, c.head_dim, length).unsqueeze(1)
            query, key = _rotate(query, angles), _rotate(key, angles)
        mixed = self._attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return mixed.transpose(1, 2).flatten(2)

    def add_attention(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The residual stream plus the projected attention."""
        return hidden + self._output_norm(self.linears[O](mixed), self._weights.attention_output_norm)

    def mlp_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input rows of the MLP, or of router and experts: [B * T, hidden]."""
        return self._norm(hidden, self.norms["mlp"]).flatten(0, 1)

    def routed(self, normed: torch.Tensor) -> list[Rows]:
        """Which rows each MLP computes."""
        if self._experts is None or self.router is None:
            return [Rows(self.mlps[0], None, None)]
        best, chosen = functional.linear(normed, self.router).softmax(-1).topk(self._experts.per_token, dim=-1)
        if self._experts.normalise:
            best = best / best.sum(-1, keepdim=True)
        rows = []
        for expert, names in enumerate(self.mlps):
            which, choice = (chosen == expert).nonzero(as_tuple=True)
            rows.append(Rows(names, which, best[which, choice].unsqueeze(1)))
        return rows

    def activated(self, names: MlpNames, rows: torch.Tensor) -> torch.Tensor:
        """Input of an MLP's down projection: [n, intermediate]."""
        gate, up = self.linears[names.gate](rows), self.linears[names.up](rows)
        if self._config.activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    def add_mlp(self, hidden: torch.Tensor, normed: torch.Tensor, routed: list[Rows]) -> torch.Tensor:
        """The residual stream plus the output of the MLP or the experts."""
        added = torch.zeros_like(normed)
        for rows in routed:
            computed = self.linears[rows.names.down](self.activated(rows.names, rows.of(normed)))
            if rows.which is None or rows.shares is None:
                added = computed
            else:
                added.index_add_(0, rows.which, computed * rows.shares)
        return hidden + self._output_norm(added.view_as(hidden), self._weights.mlp_output_norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight.float(), self._config.rms_norm_eps)

    def _output_norm(self, added: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return added if weight is None else self._norm(added, weight)

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal, within the window: query [B, heads, T, head_dim], key and value [B, kv heads, T, head_dim]."""
        c, length = self._config, query.shape[2]
        scale = c.attention_scale or c.head_dim**-0.5
        if self._window is None and c.attention_softcap is None:
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=self.shares_heads
            )
        ago = torch.arange(length).unsqueeze(1) - torch.arange(length)
        visible = (ago >= 0) & (ago < (self._window or length))
        if c.attention_softcap is None:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=scale, enable_gqa=self.shares_heads
            )
        each = c.num_heads // c.num_kv_heads
        scores = query @ key.repeat_interleave(each, dim=1).mT * scale
        scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value.repeat_interleave(each, dim=1)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of experts in a model's files: Mixtral's first names, or those of all others."""

    mixtral: bool = False

    @classmethod
    def of(cls, store: TensorStore) -> ExpertNames:
        """From tensor names."""
        return cls(any(".block_sparse_moe." in name for name in store.names()))

    def of_layer(self, weights: LayerWeights) -> tuple[MlpNames, ...]:
        """Names of the MLP of a layer, or of each of its experts."""
        if weights.router is None:
            return (_names("mlp", "gate_proj", "up_proj", "down_proj"),)
        place, parts = "mlp", ("gate_proj", "up_proj", "down_proj")
        if self.mixtral:
            place, parts = "block_sparse_moe", ("w1", "w3", "w2")
        return tuple(_names(f"{place}.experts.{expert}", *parts) for expert in range(len(weights.mlps)))

    @property
    def router(self) -> str:
        """The router's name in its layer."""
        return "block_sparse_moe.gate" if self.mixtral else "mlp.gate"


def _names(at: str, gate: str, up: str, down: str) -> MlpNames:
    return MlpNames(f"{at}.{gate}", f"{at}.{up}", f"{at}.{down}")


def _attention_linears(weights: LayerWeights) -> Mapping[str, DenseLinear]:
    parts = {Q: weights.query, K: weights.key, V: weights.value, O: weights.output}
    return {name: _dense(part) for name, part in parts.items()}


def _mlp_linears(names: MlpNames, mlp: Mlp) -> Mapping[str, DenseLinear]:
    return {names.gate: _dense(mlp.gate), names.up: _dense(mlp.up), names.down: _dense(mlp.down)}


def _dense(linear: Linear) -> DenseLinear:
    return DenseLinear(linear.dense.float(), None if linear.bias is None else linear.bias.float())


def _rotate(x: torch.Tensor, cosines_sines: torch.Tensor) -> torch.Tensor:
    cosines, sines = cosines_sines.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
