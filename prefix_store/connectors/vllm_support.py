"""What of vLLM the connector was made for: its versions, the models and set-ups whose blocks it may store, and what
engines must have in common to share them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from prefix_store.frames.layout import BlockLayout
from prefix_store.identity.files import digest_of_files
from prefix_store.identity.fingerprint import Fingerprint
from prefix_store.identity.served_model import TOKENIZER, WEIGHTS, described, model_files, processor
from prefix_store.store.config import StoreConfig

log = logging.getLogger(__name__)

TESTED = ("0.32",)
"""Versions of vLLM, without the last number, that the tests have run with."""
_NEEDED = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "_get_connector_metadata",
        "bind_connector_metadata",
        "build_connector_meta",
        "build_connector_worker_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "get_block_ids_with_load_errors",
        "get_finished",
        "get_kv_connector_stats",
        "get_num_new_matched_tokens",
        "handle_preemptions",
        "has_connector_metadata",
        "on_new_request",
        "register_kv_caches",
        "request_finished",
        "requires_kv_delivery",
        "reset_cache",
        "save_kv_layer",
        "shutdown",
        "start_load_kv",
        "update_connector_output",
        "update_state_after_alloc",
        "wait_for_layer_load",
        "wait_for_save",
    ),
    "vllm.v1.request:Request": (
        "all_token_ids",
        "cache_salt",
        "lora_request",
        "mm_features",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_embeds",
        "request_id",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.core.sched.output:KVConnectorBlockState": ("get_block_ids",),
    "vllm.v1.outputs:KVConnectorOutput": ("finished_recving", "kv_connector_worker_meta"),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "preempted_req_ids",
    ),
}
_SPECULATION = ("ngram", "ngram_gpu", "suffix")
"""Methods that have no KV cache of their own."""
_LAYOUT = 1
"""Raised with every change of the order of a block's bytes."""


def check_version(version: str) -> None:
    """Checks that this vLLM has what the connector needs; warns if it is newer than those that were tested.

    Raises:
        ValueError: names what it lacks.
    """
    import importlib

    for place, names in _NEEDED.items():
        module, _, class_name = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), class_name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"vLLM {version} has no {module}.{class_name}; {_tested()}") from error
        set_in_init = getattr(found.__init__, "__code__", None)
        fields = {*dir(found), *getattr(found, "__dataclass_fields__", ()), *getattr(set_in_init, "co_names", ())}
        for name in names:
            if name not in fields:
                raise ValueError(f"vLLM {version} has no {class_name}.{name}; {_tested()}")
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        log.warning("vLLM %s: %s; answers may be wrong where its interface has changed", version, _tested())


def check_setup(config: Any, kv_cache_config: Any) -> None:
    """Checks a ``VllmConfig`` and a ``KVCacheConfig``.

    Raises:
        ValueError: names the option or the model, and why its blocks are not stored.
    """
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    name = model.model
    if model.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder, whose output its KV blocks depend on; expected a decoder only")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ValueError(
            f"{name} is a hybrid model, with {len(groups)} kinds of KV cache ({kinds}); expected one, of full attention"
        )
    spec = groups[0].kv_cache_spec
    for part in (spec, *getattr(spec, "kv_cache_specs", {}).values()):
        for limit in ("sliding_window", "attention_chunk_size"):
            if getattr(part, limit, None) is not None:
                raise ValueError(
                    f"{name} has layers with {limit} {getattr(part, limit)}; expected full attention in every layer"
                )
    if not any(kind.__name__ in ("FullAttentionSpec", "MLAAttentionSpec") for kind in type(spec).__mro__):
        raise ValueError(f"{name} has a KV cache of {type(spec).__name__}; expected full attention")
    if config.load_config.load_format == "dummy":
        raise ValueError("--load-format dummy: the weights are random, and so are their KV blocks; expected a model's")
    if getattr(config.cache_config, "calculate_kv_scales", False):  # versions before 0.32
        raise ValueError("--calculate-kv-scales: blocks of other starts have other scales; expected it to be off")
    for option in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, option, 1) > 1:
            raise ValueError(
                f"--{option.replace('_', '-')} {getattr(parallel, option)}: expected 1 with this connector"
            )
    speculation = config.speculative_config
    if speculation is not None and speculation.method not in _SPECULATION:
        raise ValueError(
            f"--speculative-config: method is {speculation.method}, whose draft has a KV cache of its own; "
            f"expected one of {', '.join(_SPECULATION)}"
        )
    if transfer.kv_load_failure_policy != "recompute":
        # Its default fails the request.
        transfer.kv_load_failure_policy = "recompute"


def check_codecs(config: StoreConfig) -> None:
    """Raises ValueError for a codec that reads a block's numbers: their order in it is each attention kernel's own."""
    for name, codec in config.codecs.items():
        if not codec.is_exact:
            raise ValueError(f"{name} is {codec.name}, expected plain: each kernel has an order of its own in a block")


async def fingerprint_of(
    config: Any, version: str, attention: Iterable[str], layout: BlockLayout, rank: int
) -> Fingerprint:
    """The fingerprint of one worker's part of the KV blocks; reads the model's files in a thread.

    Nothing of it is of one instance or one start.

    Args:
        config: a ``VllmConfig``.
        version: of vLLM.
        attention: the kernels of the attention layers.
        layout: of a block.
        rank: of the worker among those that have a part of each block.

    Raises:
        ValueError: the model's files are not on this machine.
        OSError: a file cannot be read.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    weights = model_files(model.model, model.revision, WEIGHTS, "model")
    tokenizer = model_files(model.tokenizer, model.tokenizer_revision, TOKENIZER, "tokenizer")
    rope, described_config = described(model.hf_text_config.to_dict())
    mode = "eager" if model.enforce_eager else "compiled"
    kernels = ", ".join(sorted(set(attention)))
    return Fingerprint(
        weights=await digest_of_files(weights),
        tokenizer=await digest_of_files(tokenizer),
        quantisation=str(model.quantization or "none"),
        rope=rope,
        geometry={
            "config": described_config,
            "block": [layout.dtype, list(layout.shape)],
            "ranks": parallel.tensor_parallel_size,
            "rank": rank,
        },
        numerics=f"vllm {version}, {model.dtype}, {kernels}, {mode}, {processor()}",
        kv_dtype=str(cache.cache_dtype),
        layout=_LAYOUT,
        block_size=cache.block_size,
    )


def _tested() -> str:
    return f"this connector was tested with {', '.join(TESTED)}"
