"""What of SGLang the backend was made for, what makes two engines' pages the same, and where a page is in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sglang
import torch

from prefix_store.frames.layout import DTYPES, BlockLayout
from prefix_store.frames.segments import Segments
from prefix_store.identity.files import digest_of_files
from prefix_store.identity.fingerprint import Fingerprint
from prefix_store.identity.served_model import TOKENIZER, WEIGHTS, described, model_files, processor

TESTED = ("0.5.23",)
"""Versions of SGLang that the tests have run with: most releases have changed what is used here."""

try:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.runtime_context import (
        get_exec,
        get_lora,
        get_model,
        get_parallel,
        get_server_args,
        get_serving,
        get_spec,
    )
except ImportError as missing:
    raise ImportError(f"SGLang {sglang.__version__}: {missing}; tested with {', '.join(TESTED)}") from missing

_NEEDED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        HiCacheStorage,
        ("batch_exists", "batch_get_v1", "batch_set_v1", "register_mem_pool_host", "register_mem_host_pool_v2"),
    ),
    (
        HiCacheStorageConfig,
        ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "extra_config"),
    ),
    (HiCacheStorageExtraInfo, ("prefix_keys",)),
)
_LAYOUT = 1
"""Raised with every change of the order of a page's bytes."""
_AXES = {
    MHATokenToKVPoolHost: {
        "layer_first": "plthd",
        "page_first": "ptlhd",
        "page_first_direct": "pnlthd",
        "page_head": "pnhtld",
    },
    MLATokenToKVPoolHost: {"layer_first": "lthd", "page_first": "tlhd", "page_first_direct": "nlthd"},
}
"""The axes of the pools that are known, by their layouts: those of `BlockLayout` and page(n)umber. Without it, the axis
of tokens has those of all pages."""
_ORDERS = {MHATokenToKVPoolHost: "plthd", MLATokenToKVPoolHost: "lthd"}
"""A page's bytes are in this order, whatever the pool's layout."""
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ADAPTER = ("adapter_model.*", "adapter_config.json")
_FROM_FILES = (
    *("auto", "pt", "safetensors", "instanttensor", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral"),
    *("layered", "fastsafetensors"),
)
"""Load formats whose weights are those of the model's files."""
_KERNELS = ("kernel", "moe", "comm", "deterministic", "dllm")
"""Groups of SGLang's settings that choose kernels."""


def check_version() -> None:
    """Checks that this SGLang has what the backend needs.

    Raises:
        ValueError: names what it lacks.
    """
    for kind, names in _NEEDED:
        known = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
        for name in names:
            if name not in known:
                raise ValueError(
                    f"SGLang {sglang.__version__} has no {kind.__name__}.{name}; tested with {', '.join(TESTED)}"
                )


def check_setup(storage: HiCacheStorageConfig) -> None:
    """Checks how the engine was started.

    Raises:
        ValueError: names the option or the model, and why its pages are not stored.
    """
    model, spec = get_model(), get_spec()
    if model.load_format not in _FROM_FILES:
        raise ValueError(
            f"--load-format {model.load_format}: the weights are not those of the model's files; "
            f"expected one of {', '.join(_FROM_FILES)}"
        )
    if model.checkpoint_engine_wait_weights_before_ready:
        raise ValueError("--checkpoint-engine-wait-weights-before-ready: the weights are not those of the files")
    if model.weight_cache_mode != "off":
        raise ValueError(f"--weight-cache-mode {model.weight_cache_mode}: expected off, with weights from files")
    if spec.speculative_algorithm not in (None, "NGRAM"):
        raise ValueError(
            f"--speculative-algorithm {spec.speculative_algorithm}: its draft has a KV cache of its own; "
            "expected NGRAM or none"
        )
    if _config().is_multimodal:
        raise ValueError(
            f"{model.model_path} takes images or sound, which SGLang's keys of pages tell apart by 64 bits that "
            "callers may choose; expected a model of text, or --language-model-only"
        )
    if storage.tp_lcm_size:
        raise ValueError("tp_lcm_size: engines with other numbers of ranks share no pages; expected none")
    if storage.dcp_size > 1:
        raise ValueError(f"--dcp-size {storage.dcp_size}: expected 1 with this backend")


def worker_number() -> int:
    """The number of this process among those of the engine."""
    parallel = get_parallel()
    return int((parallel.dp_rank or 0) * parallel.launch_world_size + parallel.launch_world_rank)


def weight_version() -> str:
    """Changed by those who update the weights while the engine runs."""
    return str(get_serving().weight_version)


class HostPages:
    """The pages of a host pool, which the store reads and writes where they are.

    Raises:
        ValueError: the pool is of another kind, layout or dtype than those that are known.
    """

    def __init__(self, pool: Any) -> None:
        kind, buffer = type(pool), pool.kv_buffer
        if kind not in _AXES or not isinstance(buffer, torch.Tensor):
            known = " or ".join(one.__name__ for one in _AXES)
            raise ValueError(f"the host pool is a {kind.__name__}, expected {known}: hybrid models are not supported")
        axes = _AXES[kind].get(pool.layout)
        if axes is None or buffer.dim() != len(axes):
            raise ValueError(
                f"--hicache-mem-layout {pool.layout}, of {buffer.dim()} dimensions: expected one of "
                f"{', '.join(_AXES[kind])}"
            )
        dtype = str(buffer.dtype).removeprefix("torch.")
        if dtype not in DTYPES or buffer.device.type != "cpu":
            raise ValueError(f"the host pool is of {dtype} on {buffer.device}, expected one of {', '.join(DTYPES)}")
        order = _ORDERS[kind]
        raw = buffer.view(_AS_INTEGERS[buffer.element_size()])
        if "n" not in axes:
            slots = axes.index("t")
            raw = raw.view(*raw.shape[:slots], -1, pool.page_size, *raw.shape[slots + 1 :])
            axes = axes.replace("t", "nt")
        self._pages = raw.permute([axes.index(axis) for axis in "n" + order]).numpy()
        self.size: int = pool.page_size
        """Tokens in a page."""
        self.layout = BlockLayout(dtype, self._pages.shape[1:], order if "p" in order else "")

    def at(self, slots: torch.Tensor, count: int) -> Sequence[Segments]:
        """The pages at these slots of tokens [count * size].

        Raises:
            ValueError: they are not those of so many pages.
        """
        starts = slots[:: self.size].tolist()
        if slots.numel() != count * self.size or any(
            start % self.size or not 0 <= start < len(self._pages) * self.size for start in starts
        ):
            raise ValueError(f"{slots.numel()} slots of the host pool are not those of {count} pages of {self.size}")
        return [[self._pages[start // self.size]] for start in starts]


async def fingerprint_of(storage: HiCacheStorageConfig, pool: Any, layout: BlockLayout) -> Fingerprint:
    """The fingerprint of one rank's part of the pages; reads the model's files in a thread.

    Args:
        pool: the host pool.
        layout: of a page.

    Raises:
        ValueError: the model's files are not on this machine.
        OSError: a file cannot be read.
    """
    model, config = get_model(), _config()
    weights = model_files(model.model_path, model.revision, WEIGHTS, "model-path", model.download_dir)
    if model.quantization_param_path:
        weights.append(Path(model.quantization_param_path))
    tokenizer = get_serving().tokenizer_path or model.model_path
    tokenizer_files = model_files(tokenizer, model.revision, TOKENIZER, "tokenizer-path", model.download_dir)
    rope, described_config = described(config.hf_text_config.to_dict())
    kernels = {group: getattr(get_exec(), group)._fields for group in _KERNELS}
    return Fingerprint(
        weights=await digest_of_files(weights),
        tokenizer=await digest_of_files(tokenizer_files),
        quantisation=f"{config.quantization or 'none'} {model.modelopt_quant or ''} {model.rl_quant_profile or ''}",
        rope=rope,
        geometry={
            "config": described_config,
            "block": [layout.dtype, list(layout.shape)],
            "layers": [pool.start_layer, pool.end_layer],
            "adapters": await _adapters(),
            **_ranks(storage),
        },
        numerics=f"sglang {sglang.__version__}, torch {torch.__version__}, {model.model_impl}, {config.dtype}, "
        f"{processor()}, {json.dumps(kernels, sort_keys=True, default=str)}",
        kv_dtype=str(model.kv_cache_dtype),
        layout=_LAYOUT,
        block_size=pool.page_size,
    )


def _config() -> ModelConfig:
    return ModelConfig.from_server_args(get_server_args())


def _ranks(storage: HiCacheStorageConfig) -> dict[str, list[int]]:
    """Which part of a page this rank has. All ranks of tensor parallelism have the same of MLA."""
    return {
        "tp": [0 if storage.is_mla_model else storage.tp_rank, storage.tp_size, get_parallel().tp_size],
        "pp": [storage.pp_rank, storage.pp_size],
        "cp": [storage.attn_cp_rank, storage.attn_cp_size],
        "ep": [get_parallel().ep_size],
    }


async def _adapters() -> dict[str, bytes]:
    """Digests of the LoRA adapters that the engine was started with. SGLang's keys have their names and paths; of those
    that are loaded later, an identity of the process."""
    return {
        adapter.lora_name: await digest_of_files(
            model_files(adapter.lora_path, None, _ADAPTER, "lora-paths", get_model().download_dir)
        )
        for adapter in get_lora().lora_paths or ()
    }
