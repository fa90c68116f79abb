"""SGLang's own parts on a CPU: settings, host pools, the backend factory, the controller and the radix cache."""

import functools
import json
import tempfile
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from prefix_store.connectors.sglang import KeepgateStorage

PAGE, LAYERS, HEADS, DIM, SLOTS = 16, 4, 2, 64, 4096
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
CLASS = {
    "backend_name": "keepgate",
    "module_path": "prefix_store.connectors.sglang",
    "class_name": "KeepgateStorage",
    "interface_v1": 1,
}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, **config: Any) -> None:
    """Files of a model. Nothing computes with the weights, of which the digest alone counts."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")


def start_engine(model: Path, **arguments: Any) -> ServerArgs:
    """The settings of this process are those of an engine with this model from now on."""
    args = ServerArgs(
        **{
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "page_size": PAGE,
            **arguments,
        }
    )
    args._mamba_cache_chunk_size = 64
    publish(args, role="scheduler")
    return args


def device_pool(dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPool:
    """Keys and values as the engine computes them."""
    return MHATokenToKVPool(
        size=SLOTS,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )


def host_pool(
    layout: str, dtype: torch.dtype = torch.bfloat16, device: MHATokenToKVPool | None = None, page: int = PAGE
) -> Any:
    """Host memory for twice the pages of the engine."""
    info = (device or device_pool(dtype))._mha_buffer_info()
    return MHATokenToKVPoolHost(info, 2.0, 0, page, layout, **_sizes())


def mla_pool(layout: str) -> Any:
    """Host memory of a model with multi-head latent attention."""
    device = MLATokenToKVPool(SLOTS, PAGE, torch.bfloat16, 96, 32, LAYERS, "cpu", False)
    return MLATokenToKVPoolHost(device._mla_buffer_info(), 2.0, 0, PAGE, layout, target_layer_num=LAYERS, **_sizes())


def _sizes() -> dict[str, Any]:
    return {
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": SLOTS,
        "start_layer": 0,
        "end_layer": LAYERS,
    }


def rows(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    """What a host pool has of these tokens: [tokens, part, layer, head, dim]; of MLA [tokens, layer, head, dim]."""
    return _permuted(pool, _read(pool, slots))


def fill(pool: Any, slots: torch.Tensor, numbers: torch.Tensor) -> None:
    """Puts numbers, as ``rows`` gives them, into a host pool."""
    buffer, (page, token) = pool.kv_buffer, (slots // PAGE, slots % PAGE)
    data = _permuted(pool, numbers)
    if pool.layout == "layer_first":
        buffer[..., slots, :, :] = data.movedim(0, -3)
    elif isinstance(pool, MLATokenToKVPoolHost):
        if pool.layout == "page_first":
            buffer[slots] = data
        else:
            buffer[page, :, token] = data
    elif pool.layout == "page_first":
        buffer[:, slots] = data.movedim(0, 1)
    else:
        buffer[:, page, :, token] = data


def _read(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    buffer: torch.Tensor
    buffer, (page, token) = pool.kv_buffer, (slots // PAGE, slots % PAGE)
    if pool.layout == "layer_first":
        return buffer[..., slots, :, :].movedim(-3, 0)
    if isinstance(pool, MLATokenToKVPoolHost):
        return buffer[slots] if pool.layout == "page_first" else buffer[page, :, token]
    return buffer[:, slots].movedim(1, 0) if pool.layout == "page_first" else buffer[:, page, :, token]


def _permuted(pool: Any, numbers: torch.Tensor) -> torch.Tensor:
    """In a page of `page_head` heads come before layers."""
    return numbers.transpose(2, 3) if pool.layout == "page_head" else numbers


def random_numbers(pool: Any, tokens: int, seed: int = 0) -> torch.Tensor:
    """Numbers for tokens of a host pool, none of which is zero."""
    shape = rows(pool, torch.arange(1)).shape[1:]
    some = torch.rand((tokens, *shape), generator=torch.Generator().manual_seed(seed)) + 0.5
    return (
        (some * 100).to(pool.kv_buffer.dtype)
        if not pool.kv_buffer.dtype.is_floating_point
        else some.to(pool.kv_buffer.dtype)
    )


def is_equal(some: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    one, two = (tensor.contiguous().view(torch.uint8).numpy() for tensor in (some, other))
    return np.array_equal(one, two)


def slots_of(first_page: int, pages: int) -> torch.Tensor:
    """The slots of consecutive pages."""
    return torch.arange(first_page * PAGE, (first_page + pages) * PAGE)


def prompt_key(pages: int, salt: str | None = None, adapter: str | None = None, first_token: int = 0) -> RadixKey:
    """A prompt of so many pages."""
    return RadixKey(array("q", range(first_token, first_token + pages * PAGE)), extra_key=adapter, cache_salt=salt)


def page_keys(pages: int, salt: str | None = None, **prompt: Any) -> list[str]:
    """SGLang's keys of its pages."""
    keys: list[str] = get_storage_hash_str(prompt_key(pages, salt, **prompt), None, page_size=PAGE)
    return keys


def after(before: list[str] | None) -> HiCacheStorageExtraInfo:
    """What SGLang says of the pages before those of a call."""
    return HiCacheStorageExtraInfo(prefix_keys=before)


def storage_config(rank: dict[str, Any], options: dict[str, Any]) -> HiCacheStorageConfig:
    """What SGLang says to a backend."""
    return HiCacheStorageConfig(
        **{
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": True,
            "is_page_first_layout": False,
            "model_name": "org/model",
            "extra_config": {**CLASS, **options},
            **rank,
        }
    )


def attach_backend(pool: Any, rank: dict[str, Any], options: dict[str, Any]) -> KeepgateStorage:
    """A backend as SGLang's factory makes it."""
    backend: KeepgateStorage = StorageBackendFactory.create_backend("dynamic", storage_config(rank, options), pool)
    backend.register_mem_pool_host(pool)
    return backend


def files_of(disk: Path, backend: KeepgateStorage, keys: list[str]) -> list[Path]:
    """The files of a prompt's pages."""
    return [next(disk.glob(f"blocks/*/{block.key.hex()}-*")) for block in backend._chain([], keys)]


@functools.cache
def group() -> Any:
    """The process group of an engine with one rank."""
    folder = tempfile.mkdtemp()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    return torch.distributed.group.WORLD


@contextmanager
def controller(layout: str, disk: Path, **options: Any) -> Iterator[HiCacheController]:
    """SGLang's controller with its threads, over the backend."""
    device = device_pool()
    allocator = PagedTokenToKVPoolAllocator(
        SLOTS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
    )
    made = HiCacheController(
        allocator,
        host_pool(layout, device=device),
        PAGE,
        group(),
        threading.Event(),
        write_policy="write_through",
        io_backend="direct",
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="org/model",
        storage_backend_extra_config={**CLASS, "disk": str(disk), "disk_size": 2**30, **options},
    )
    try:
        yield made
    finally:
        made.detach_storage_backend()
