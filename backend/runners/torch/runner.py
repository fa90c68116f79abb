"""The reference runner: the decoder in plain torch. Every other runner is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch.nn import functional

from backend.engine.kv_blocks import KvBlocks
from backend.engine.model_runner import BLOCK_SIZE, CPU_BATCH, CPU_STEP_TOKENS, StepInput, StepOutput
from backend.model_loader.weights import LayerWeights, Linear, Mlp, ModelWeights
from backend.models.config import Activation, Experts, KvDtype, ModelConfig
from backend.models.rope import rotations
from backend.runners.torch.attention import StepAttention
from backend.runners.torch.exchange import Exchange, NoExchange
from backend.runners.torch.kv_memory import KvMemory
from backend.runners.torch.linear import TorchLinear
from backend.runners.torch.quantized_matmul import KernelTable


class TorchRunner:
    """Runs steps with torch operations.

    Its matrix products may round differently for different numbers of rows, so ``deterministic`` is False.

    Args:
        num_blocks: KV blocks to own; memory is ``num_blocks * block_bytes(config, dtype, kv_dtype)``.
        max_context: positions the rotary tables cover.
        dtype: of weights and activations; norms, rotary angles and softmax are computed in float32 whatever it is.
        kv_dtype: of stored keys and values; auto: ``dtype``.
        memory: where keys and values are stored; None: memory of its own.
        exchange: joins the parts of layers, where ``weights`` are a part of the model that others have more of.
    """

    deterministic = False
    max_batch, step_tokens = CPU_BATCH, CPU_STEP_TOKENS

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        num_blocks: int,
        max_context: int,
        dtype: torch.dtype = torch.float32,
        kv_dtype: KvDtype = "auto",
        *,
        memory: KvMemory | None = None,
        exchange: Exchange = NoExchange(),  # noqa: B008 - has no state
    ) -> None:
        self.config = config
        kv_name = "" if kv_dtype == "auto" else f"-kv-{kv_dtype}"
        self.name = f"torch-{str(dtype).removeprefix('torch.')}{kv_name}"
        self.kernels = f"torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}"
        self.weights_precision = str(dtype).removeprefix("torch.")
        self.kv_precision = self.weights_precision if kv_dtype == "auto" else kv_dtype
        self.kv_bytes_per_token = self.block_bytes(config, dtype, kv_dtype) // BLOCK_SIZE
        self.num_blocks = num_blocks
        self._embedding = weights.embedding.to(dtype)
        # Tied to the embedding it is not there twice.
        head = self._embedding if weights.head is weights.embedding else weights.head
        table = KernelTable()
        self._head = TorchLinear([Linear(head, None)], dtype, table)
        self._norm = weights.norm.float()
        self._exchange = exchange
        self._layers = [
            _Layer(config, index, layer, dtype, table, exchange) for index, layer in enumerate(weights.layers)
        ]
        ropes = {layer.rope for layer in self._layers if layer.rope is not None}
        self._rotations = {rope: rotations(rope, config.head_dim, max_context) for rope in ropes}
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype)
        self._memory = memory or KvMemory(config, num_blocks, dtype, kv_dtype)

    @cached_property
    def kv_blocks(self) -> KvBlocks:
        """See ``ModelRunner.kv_blocks``; of a part of a model there are none, for a block is of all parts."""
        return self._memory.blocks

    @staticmethod
    def block_bytes(config: ModelConfig, dtype: torch.dtype = torch.float32, kv_dtype: KvDtype = "auto") -> int:
        """Bytes of one KV block over all layers."""
        return KvMemory.block_bytes(config, dtype, kv_dtype)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """See ``ModelRunner.run``."""
        return self.outputs(step)

    @torch.inference_mode()
    def layers(self, step: StepInput, received: torch.Tensor | None = None) -> torch.Tensor:
        """What leaves the last layer, [T, hidden]; keys and values of all rows are written.

        Args:
            received: what enters the first layer, [T, hidden]; None: the embeddings of the step's tokens.
        """
        hidden = self._embed(step) if received is None else received
        attention = StepAttention(step, self.config)
        positions = torch.from_numpy(step.positions).long()
        angles = {rope: table[positions].unsqueeze(1) for rope, table in self._rotations.items()}
        for layer in self._layers:
            query, key, value = layer.project(hidden)
            if layer.rope is not None:
                query, key = _rotate(query, angles[layer.rope]), _rotate(key, angles[layer.rope])
            self._memory.write(layer.index, attention.slots, key, value)
            hidden = layer.add_attention(hidden, attention(layer.index, query, self._memory))
            hidden = layer.add_mlp(hidden)
        return hidden

    @torch.inference_mode()
    def outputs(self, step: StepInput, received: torch.Tensor | None = None) -> StepOutput:
        """`layers`, and then logits and hidden states of the rows that the step names."""
        hidden = self.layers(step, received)
        wanted = self._last_norm(hidden[torch.from_numpy(step.logits_rows).long()])
        states = self._last_norm(hidden[torch.from_numpy(step.hidden_rows).long()])
        logits = self._head(wanted).float()
        cap = self.config.logit_softcap
        return StepOutput(logits if cap is None else cap * torch.tanh(logits / cap), states.float())

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``."""
        self._memory.move(moves)

    def _embed(self, step: StepInput) -> torch.Tensor:
        token_ids = torch.from_numpy(step.token_ids).long()
        return self._exchange.lookup(self._embedding, token_ids) * self._embedding_scale

    def _last_norm(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self._norm, self.config.rms_norm_eps)


class _Layer:
    """One layer without its attention: projections before it, output and MLP after it. Rows are [T, hidden]."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        dtype: torch.dtype,
        table: KernelTable,
        exchange: Exchange,
    ) -> None:
        self.index = index
        self.rope = config.rope(index)
        self._config = config
        self._input_norm = weights.input_norm.float()
        self._query_norm = _float(weights.query_norm)
        self._key_norm = _float(weights.key_norm)
        self._qkv = TorchLinear((weights.query, weights.key, weights.value), dtype, table)
        self._sum = exchange.sum
        self._output = TorchLinear((weights.output,), dtype, table)
        self._project = exchange.projection(weights.output)
        self._attention_output_norm = _float(weights.attention_output_norm)
        self._mlp_norm = weights.post_attention_norm.float()
        self._mlps = [_Mlp(mlp, config.activation, dtype, table, exchange) for mlp in weights.mlps]
        self._router = None if weights.router is None else weights.router.to(dtype)
        self._experts = config.layer_experts(index)
        self._mlp_output_norm = _float(weights.mlp_output_norm)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [T, heads, head_dim], key and value [T, kv heads, head_dim], not yet rotated."""
        c = self._config
        normed = _rms_norm(hidden, self._input_norm, c.rms_norm_eps)
        heads = self._qkv(normed).view(len(hidden), -1, c.head_dim)
        query, key, value = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if self._query_norm is not None and self._key_norm is not None:
            query = _rms_norm(query, self._query_norm, c.rms_norm_eps)
            key = _rms_norm(key, self._key_norm, c.rms_norm_eps)
        return query, key, value

    def add_attention(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Projects what attention mixed and adds it to the residual stream."""
        added = self._sum(self._project(mixed.flatten(1), self._output))
        return hidden + self._normed_output(added, self._attention_output_norm)

    def add_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """Adds the MLP, or the mixture of experts, to the residual stream."""
        normed = _rms_norm(hidden, self._mlp_norm, self._config.rms_norm_eps)
        if self._experts is None or self._router is None:
            added = self._mlps[0](normed)
        else:
            added = _mixture(normed, self._router, self._mlps, self._experts)
        return hidden + self._normed_output(self._sum(added), self._mlp_output_norm)

    def _normed_output(self, added: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return added if weight is None else _rms_norm(added, weight, self._config.rms_norm_eps)


class _Mlp:
    """A gated MLP with gate and up as one product."""

    def __init__(
        self, weights: Mlp, activation: Activation, dtype: torch.dtype, table: KernelTable, exchange: Exchange
    ) -> None:
        self._gate_up = TorchLinear((weights.gate, weights.up), dtype, table)
        self._down = TorchLinear((weights.down,), dtype, table)
        self._project = exchange.projection(weights.down)
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        activated = functional.silu(gate) if self._activation == "silu" else functional.gelu(gate, approximate="tanh")
        return self._project(activated * up, self._down)


def _mixture(x: torch.Tensor, router: torch.Tensor, mlps: list[_Mlp], experts: Experts) -> torch.Tensor:
    """Each row is the weighted sum of its best experts; an expert computes the rows that chose it, in one product."""
    shares = functional.linear(x, router).float().softmax(-1)
    best, chosen = shares.topk(experts.per_token, dim=-1)
    if experts.normalise:
        best = best / best.sum(-1, keepdim=True)
    # (row, choice) pairs in the order of their experts; a row is summed in the order of its choices.
    pairs = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts.count).tolist()
    groups = torch.split(x[pairs // experts.per_token], counts)
    computed = torch.cat([mlp(rows) for mlp, rows in zip(mlps, groups, strict=True) if len(rows)])
    answers = torch.empty_like(computed).index_copy_(0, pairs, computed)
    return (answers.view(*chosen.shape, -1) * best.unsqueeze(-1).to(x.dtype)).sum(1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # The mean is taken in float32 whatever the dtype, as the models were trained.
    return functional.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def _rotate(x: torch.Tensor, cosines_sines: torch.Tensor) -> torch.Tensor:
    cosines, sines = cosines_sines.to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()
