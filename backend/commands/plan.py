"""``keepgate plan``: how much of a device's memory a model needs, from its ``config.json`` alone.

Keys and values of b sequences of s tokens take ``2 * layers * KV heads * head size * s * b`` numbers: one key and one
value for each layer, KV head and token. A number has four bytes with float32 weights and two with all others, or one
byte with ``--kv-dtype``. torch is not imported.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from backend.commands.argument_types import memory_size, positive
from backend.commands.command_line import Parser, exit_on_broken_pipe, ignore_broken_pipe, run_command
from backend.engine.model_runner import BLOCK_SIZE
from backend.models.config import KvDtype, ModelConfig
from backend.models.hf_config import read_hf_config
from backend.models.json_file import read_json_object
from backend.models.partition import ModelPart, part_bytes, partition
from backend.models.sizes import PRECISIONS, Precision, count_parameters, kv_bytes_per_token, weight_bytes

_KV_COLUMNS: dict[str, Precision] = {"2 bytes": "bfloat16", "4 bytes": "float32"}
"""Columns of the table, and a precision of weights for which keys and values have that size."""
_RANGES = {
    "layers": "layers",
    "heads": "heads",
    "kv_heads": "KV heads",
    "inner_features": "MLP features",
    "vocabulary": "vocabulary",
}
"""Columns of the table of ranks, by field."""
_SHORTEST = 512
_GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One length of sequences."""

    tokens: int
    kv_bytes: dict[Precision, int]
    """Keys and values of one sequence, by the weights' precision."""
    batch: dict[Precision, int]
    """Sequences that fit beside the weights, by the weights' precision."""


@dataclass(frozen=True)
class Rank:
    """What one process has. Ranges are [first, end)."""

    rank: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    """Several ranks may have the same one; its keys and values are in a host's memory once, and on each device."""
    inner_features: tuple[int, int]
    """Of each MLP; of experts, of each of them, if all layers have them."""
    vocabulary: tuple[int, int]
    """Rows of the embedding and of the head, where the rank has these."""
    weight_bytes: dict[Precision, int]
    kv_bytes_per_token: dict[Precision, int]
    """Keys and values that the rank writes, by the weights' precision."""


@dataclass(frozen=True)
class Plan:
    """Memory of a model and the batches that fit. Sizes are in bytes."""

    model: str
    architecture: str
    memory: int
    """Of each device, where every rank has one."""
    devices: int
    """On which memory is: those of the ranks, or 1."""
    parameters: int
    weight_bytes: dict[Precision, int]
    """Of all ranks together."""
    kv_dtype: KvDtype
    kv_bytes_per_token: dict[Precision, int]
    """By the weights' precision."""
    features_beyond_llama: tuple[str, ...]
    """Features of this model that the fused step does not support."""
    tied_head_bytes: int | None
    """Additional bytes of 16-bit weights on a CPU, which stores a tied head beside the embedding."""
    rows: tuple[Row, ...]
    kv_tokens: dict[Precision, int]
    """Tokens whose keys and values fit beside the weights, by the weights' precision."""
    kv_blocks: dict[Precision, int]
    """Blocks of 16 tokens likewise."""
    ranks: tuple[Rank, ...]
    """Empty for one process."""
    tied_in_stages: bool
    """Whether embedding and head are the same weights, and in different stages."""
    replicated_bytes: dict[Precision, int]
    """Weights that are in memory more often than in one process, by the weights' precision."""


def make_plan(
    model: str,
    config: ModelConfig,
    memory: int,
    kv_dtype: KvDtype = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    on_devices: bool = False,
) -> Plan:
    """Plans for sequences of powers of two, up to the longest that the model takes.

    Args:
        memory: of the device; of the host, where several processes share it.
        on_devices: whether each of several processes has a device, with so much memory.

    Raises:
        ModelError: the model cannot be divided among so many ranks.
    """
    parameters = count_parameters(config)
    whole = {precision: weight_bytes(parameters, precision) for precision in PRECISIONS}
    parts = partition(config, tensor_parallel, pipeline_parallel)
    ranks = tuple(_rank(config, part, kv_dtype) for part in parts) if len(parts) > 1 else ()
    needed = {name: sum(rank.weight_bytes[name] for rank in ranks) for name in PRECISIONS} if ranks else whole
    per_token = {precision: kv_bytes_per_token(config, precision, kv_dtype) for precision in PRECISIONS}
    tokens_of = {name: (memory - needed[name]) // per_token[name] for name in PRECISIONS}
    if ranks and on_devices:
        # As many as fit the device with the least room.
        tokens_of = {
            name: min((memory - rank.weight_bytes[name]) // rank.kv_bytes_per_token[name] for rank in ranks)
            for name in PRECISIONS
        }
    tokens_of = {name: max(0, tokens) for name, tokens in tokens_of.items()}
    longest = config.max_position_embeddings
    lengths = [_SHORTEST << power for power in range(32) if _SHORTEST << power < longest] + [longest]
    rows = []
    for tokens in lengths:
        held = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
        batch = {name: tokens_of[name] // held for name in PRECISIONS}
        rows.append(Row(tokens, {name: tokens * per_token[name] for name in PRECISIONS}, batch))
    return Plan(
        model,
        config.model_type,
        memory,
        len(ranks) if ranks and on_devices else 1,
        parameters.total,
        needed,
        kv_dtype,
        per_token,
        config.features_beyond_llama(),
        2 * parameters.embedding if parameters.tied and not config.features_beyond_llama() and not ranks else None,
        tuple(rows),
        tokens_of,
        {name: tokens // BLOCK_SIZE for name, tokens in tokens_of.items()},
        ranks,
        parameters.tied and pipeline_parallel > 1,
        {name: needed[name] - whole[name] for name in PRECISIONS},
    )


def _rank(config: ModelConfig, part: ModelPart, kv_dtype: KvDtype) -> Rank:
    own = part.config(config)
    features = part.expert_intermediate if config.experts and not config.experts.dense_layers else part.intermediate
    return Rank(
        rank=part.rank,
        layers=_ends(part.layers),
        heads=_ends(part.heads),
        kv_heads=_ends(part.kv_heads),
        inner_features=_ends(features),
        vocabulary=_ends(part.vocabulary),
        weight_bytes={name: part_bytes(config, part, name) for name in PRECISIONS},
        kv_bytes_per_token={name: kv_bytes_per_token(own, name, kv_dtype) for name in PRECISIONS},
    )


def _ends(of: range) -> tuple[int, int]:
    return of.start, of.stop


def read_model(name: str) -> tuple[str, ModelConfig]:
    """Name and configuration of a model; of one on the hub only ``config.json`` is downloaded.

    Raises:
        ModelError: there is no such model, or its architecture is not supported.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path.resolve().parent.name, read_hf_config(read_json_object(path), str(path))
    from backend.model_loader.source import hub_directory, resolve_model

    if name.count("/") == 1 and not path.exists() and not name.startswith((".", "/", "~")):
        config = hub_directory(name, ["config.json"]) / "config.json"
        return name, read_hf_config(read_json_object(config), str(config))
    source = resolve_model(name, lambda sentence: print(f"keepgate plan: {sentence}", file=sys.stderr))
    config = source.directory / "config.json"
    return source.name, read_hf_config(read_json_object(config), str(config))


def as_text(plan: Plan) -> str:
    """The plan as tables for people."""
    # One column of sizes for each KV precision, under the name of a weights' precision that has it.
    columns = dict(_KV_COLUMNS) if plan.kv_dtype == "auto" else {"sequence": PRECISIONS[0]}
    above = "KV of one sequence" if len(columns) > 1 else "KV of one"
    lines = [
        f"{plan.model}: {plan.architecture}, {plan.parameters / 1e9:.2f} billion parameters, "
        f"{_size(plan.memory)} of memory" + (f" on each of {plan.devices} devices" if plan.devices > 1 else ""),
        "",
        f"{'weights':<10}{'size':>12}{'left for KV':>14}{'tokens':>12}",
    ]
    for precision, needed in plan.weight_bytes.items():
        left, tokens = plan.devices * plan.memory - needed, plan.kv_tokens[precision]
        fits = f"{_size(left):>14}{tokens:>12,}" if left > 0 else f"{'does not fit':>14}{0:>12}"
        lines.append(f"{precision:<10}{_size(needed):>12}{fits}")
    lines += [
        "",
        f"keys and values: {_kv_line(plan)}",
        "",
        f"{'':<10}{above:>{12 * len(columns)}}  sequences at the same time, by the weights' precision",
        f"{'tokens':<10}" + "".join(f"{name:>12}" for name in columns) + "".join(f"{name:>10}" for name in PRECISIONS),
    ]
    for row in plan.rows:
        sizes = "".join(f"{_size(row.kv_bytes[name]):>12}" for name in columns.values())
        counts = "".join(f"{row.batch[name] or '-':>10}" for name in PRECISIONS)
        lines.append(f"{row.tokens:<10}{sizes}{counts}")
    if plan.ranks:
        lines += ["", *_rank_lines(plan)]
    lines += ["", *_notes(plan)]
    return "\n".join(lines)


def _rank_lines(plan: Plan) -> list[str]:
    """What each rank has, the blocks that they share, and what is there more than once."""
    head = f"{'rank':<6}" + "".join(f"{name:>14}" for name in _RANGES.values())
    shares = "each with a device" if plan.devices > 1 else "which share the KV memory"
    lines = [f"{len(plan.ranks)} ranks, {shares}", "", head]
    lines[-1] += "".join(f"{name:>12}" for name in PRECISIONS)
    for rank in plan.ranks:
        ranges = "".join(f"{first:>7} - {end - 1:<4}" for first, end in (getattr(rank, name) for name in _RANGES))
        lines.append(
            f"{rank.rank:<6}{ranges}" + "".join(f"{_size(rank.weight_bytes[name]):>12}" for name in PRECISIONS)
        )
    width = 6 + 14 * len(_RANGES)
    for title, cells in (
        ("in memory more than once", [_size(plan.replicated_bytes[name]) for name in PRECISIONS]),
        ("KV blocks of 16 tokens", [f"{plan.kv_blocks[name]:,}" for name in PRECISIONS]),
    ):
        lines.append(f"{title:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return [*lines, "", *_replication_notes(plan)]


def _replication_notes(plan: Plan) -> list[str]:
    notes = ["Every rank of a stage has the norms, and the routers of experts."]
    shared = Counter((rank.layers, head) for rank in plan.ranks for head in range(*rank.kv_heads))
    if most := max(shared.values()) - 1:
        blocks = "on each of their devices" if plan.devices > 1 else "there once"
        notes.append(f"Up to {most + 1} ranks have the projections of the same KV head; its blocks are {blocks}.")
    if plan.tied_in_stages:
        notes.append("The first stage has the embedding and the last one the head, although they are the same weights.")
    return notes


def _kv_line(plan: Plan) -> str:
    per_token = plan.kv_bytes_per_token
    wide, narrow = per_token["float32"] / 2**10, per_token["bfloat16"] / 2**10
    if plan.kv_dtype == "auto":
        return f"{narrow:,.1f} KiB a token (2 bytes a number); beside float32 weights {wide:,.1f} KiB (4 bytes)"
    return f"{narrow:,.1f} KiB a token ({plan.kv_dtype} with a scale for each vector)"


def _notes(plan: Plan) -> list[str]:
    notes = [
        "float16 takes what bfloat16 takes, gptq-int4 and awq-int4 about what nf4; mixed 5.5 bits a weight.",
        "A step needs a few per cent of memory in addition.",
    ]
    if plan.tied_head_bytes is not None:
        notes.append(
            f"On a CPU 16-bit weights take {_size(plan.tied_head_bytes)} more: the tied head is stored on its own."
        )
    if plan.devices > 1:
        notes.append("KV blocks are as many as fit the device with the least room: each has its part of every block.")
    elif plan.ranks:
        notes += [
            "Ranks compute with torch, in float32, and so are keys and values, unless --dtype says bfloat16.",
            "Each process takes 0.4 GiB of libraries in addition, of which most is shared.",
        ]
    elif plan.features_beyond_llama:
        notes += [
            f"On a CPU torch computes this model, which has {', '.join(plan.features_beyond_llama)}:",
            "in float32, and so are its keys and values, unless --dtype says bfloat16.",
        ]
    return notes


def _size(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB" if size >= _GIB else f"{size / 2**20:,.1f} MiB"


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 1 if the model is wrong, 2 if an argument is."""
    return run_command("keepgate plan", lambda: _plan(words))


def _plan(words: Sequence[str]) -> None:
    exit_on_broken_pipe()
    parser = Parser(
        prog="keepgate plan",
        description="How much of a device's memory a model needs: weights, KV memory and batch.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a directory with config.json, a config.json, a .gguf file, a hub id, or 'default' (the bundled model)",
    )
    parser.add_argument("--memory", type=memory_size, required=True, metavar="SIZE", help="such as 24GB or 80GiB")
    parser.add_argument(
        "--kv-dtype",
        choices=get_args(KvDtype),
        default="auto",
        help="how keys and values are stored; auto is as computed: two bytes a number with 16-bit and quantised "
        "weights, four with float32 (%(default)s)",
    )
    for name, what in (("tensor", "processes that divide each layer"), ("pipeline", "stages of layers")):
        parser.add_argument(
            f"--{name}-parallel", type=positive, metavar="N", default=1, help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where several processes compute: with cuda each has a device, and --memory is that of one (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    arguments = parser.parse_args(words)
    ignore_broken_pipe()  # while a hub is asked
    name, config = read_model(arguments.model)
    plan = make_plan(
        name,
        config,
        arguments.memory,
        arguments.kv_dtype,
        arguments.tensor_parallel,
        arguments.pipeline_parallel,
        arguments.device == "cuda",
    )
    exit_on_broken_pipe()
    print(json.dumps(asdict(plan), indent=2) if arguments.json else as_text(plan))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
