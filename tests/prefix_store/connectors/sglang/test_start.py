"""What a backend refuses, and which engines share pages."""

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.runtime_context import get_context, get_model, get_parallel, get_spec

from prefix_store.connectors.sglang import KeepgateStorage
from tests.prefix_store.connectors.sglang.conftest import Attach
from tests.prefix_store.connectors.sglang.engine import (
    PAGE,
    after,
    fill,
    host_pool,
    mla_pool,
    page_keys,
    random_numbers,
    slots_of,
    start_engine,
    write_model,
)

PAGES = 4
KEYS = page_keys(PAGES)


def write(backend: KeepgateStorage) -> None:
    """Stores pages."""
    fill(backend.mem_pool_host, slots_of(0, PAGES), random_numbers(backend.mem_pool_host, PAGES * PAGE))
    assert all(backend.batch_set_v1(KEYS, slots_of(0, PAGES), after([])))


def finds(backend: KeepgateStorage) -> bool:
    """Whether it has these pages."""
    found = backend.batch_exists(KEYS, after([]))
    assert found in (0, PAGES)
    return found > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dsik": "/kv"}, "dsik is no option of this connector; did you mean disk?"),
        ({"audit": 10}, "audit is no option of this connector"),
        ({"disk_size": True}, "--hicache-storage-backend-extra-config: .*disk_size"),
        ({"memory": "much"}, "memory: 'much' is no size"),
        ({"name": "a"}, "there is no place for blocks; expected memory"),
        ({"memory": "1GiB", "interface_v1": 0}, "interface_v1 is missing, expected 1"),
        ({"memory": 1000}, "memory_bytes: "),
    ],
)
def test_an_option_is_refused_by_its_name(attach: Attach, options: dict[str, Any], message: str) -> None:
    """With what would be right."""
    with pytest.raises(ValueError, match=message):
        attach(host_pool("layer_first"), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_format": "dummy"}, "--load-format dummy: the weights are not those of the model's files"),
        ({"checkpoint_engine_wait_weights_before_ready": True}, "--checkpoint-engine-wait-weights-before-ready"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode client: expected off"),
    ],
)
def test_weights_that_are_not_in_files_are_refused(attach: Attach, arguments: dict[str, Any], message: str) -> None:
    """Their pages could not be told apart."""
    with get_model().override(**arguments), pytest.raises(ValueError, match=message):
        attach(host_pool("layer_first"))


def test_a_draft_with_a_cache_of_its_own_is_refused(attach: Attach) -> None:
    """N-grams have none."""
    with get_spec().override(speculative_algorithm="EAGLE3"), pytest.raises(ValueError, match="EAGLE3: its draft"):
        attach(host_pool("layer_first"))
    with get_spec().override(speculative_algorithm="NGRAM"):
        write(attach(host_pool("layer_first")))


def test_a_model_of_images_is_refused(attach: Attach, tmp_path: Path) -> None:
    """Unless it is started for text."""
    folder = tmp_path / "vision"
    write_model(folder, architectures=["LlavaForConditionalGeneration"], vision_config={})
    start_engine(folder, enable_multimodal=True)
    with pytest.raises(ValueError, match="takes images or sound"):
        attach(host_pool("layer_first"))


def test_other_pools_are_refused_by_their_names(attach: Attach) -> None:
    """Those of hybrid models, of other kinds and of other layouts."""
    backend = attach(host_pool("layer_first"))
    backend.register_mem_host_pool_v2(backend.mem_pool_host, PoolName.KV)
    with pytest.raises(ValueError, match=r"a host pool mamba .* expected full attention in every layer"):
        backend.register_mem_host_pool_v2(backend.mem_pool_host, PoolName.MAMBA)
    other = mla_pool("layer_first")
    other.__class__ = type("MambaPoolHost", (type(other),), {})
    with pytest.raises(ValueError, match="the host pool is a MambaPoolHost, expected MHATokenToKVPoolHost or"):
        attach(other)
    with pytest.raises(ValueError, match="--hicache-mem-layout page_unified, of 7 dimensions: expected one of layer"):
        attach(host_pool("page_unified"))


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ({"tp_lcm_size": 8}, "tp_lcm_size: engines with other numbers of ranks share no pages"),
        ({"is_mla_model": True, "tp_size": 2}, "of 2 ranks with the same pages only the first stores them"),
    ],
)
def test_ranks_that_would_find_nothing_are_refused(attach: Attach, rank: dict[str, Any], message: str) -> None:
    """Rather than served without a hit."""
    with pytest.raises(ValueError, match=message):
        attach(host_pool("layer_first"), rank, memory="64MiB")


def test_a_version_without_the_interface_is_refused(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of what it lacks."""
    monkeypatch.delattr(HiCacheStorage, "register_mem_host_pool_v2")
    with pytest.raises(ValueError, match=r"SGLang .* has no HiCacheStorage.register_mem_host_pool_v2; tested with"):
        attach(host_pool("layer_first"))


def test_a_start_with_the_same_model_finds_the_pages(attach: Attach, model: Path, tmp_path: Path) -> None:
    """Wherever its files are, and whatever it is called."""
    write(attach(host_pool("layer_first")))
    moved = tmp_path / "moved"
    model.rename(moved)
    start_engine(moved, served_model_name="other")
    assert finds(attach(host_pool("page_first")))


def test_other_files_are_another_model(attach: Attach, model: Path) -> None:
    """Of one name: weights, tokenizer, config and adapters count by what is in them."""
    adapter = model.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"adapter")
    reference = LoRARef(lora_name="a", lora_path=str(adapter))
    adapters = {"enable_lora": True, "lora_paths": [reference], "max_lora_rank": 8, "lora_target_modules": ["all"]}
    start_engine(model, **adapters)
    write(attach(host_pool("layer_first")))
    for file in (model / "model.safetensors", model / "tokenizer.json", adapter / "adapter_model.safetensors"):
        kept = file.read_bytes()
        file.write_bytes(kept + b" ")
        assert not finds(attach(host_pool("layer_first"))), file
        file.write_bytes(kept)
    assert finds(attach(host_pool("layer_first")))
    changed = model.parent / "changed"
    write_model(changed, rope_theta=5e5)
    start_engine(changed, **adapters)
    assert not finds(attach(host_pool("layer_first")))


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float16"},
        {"attention_backend": "triton"},
        {"enable_deterministic_inference": True, "attention_backend": "triton"},
        {"kv_cache_dtype": "bf16"},
        {"page_size": 32},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_an_engine_that_computes_in_another_way_shares_nothing(
    attach: Attach, model: Path, arguments: dict[str, Any]
) -> None:
    """By SGLang's settings, with a pool of the same shape."""
    write(attach(host_pool("layer_first")))
    start_engine(model, **arguments)
    assert not finds(attach(host_pool("layer_first", page=arguments.get("page_size", PAGE))))


def test_engines_share_pages_by_their_secret(attach: Attach, disk: Path, tmp_path: Path) -> None:
    """Without it nobody can name a page."""
    place = {"disk": str(disk), "disk_size": 2**30}
    write(attach(host_pool("layer_first"), **place, secret_file=str(tmp_path / "one")))
    assert finds(attach(host_pool("layer_first"), **place, secret_file=str(tmp_path / "one")))
    assert not finds(attach(host_pool("layer_first"), **place, secret_file=str(tmp_path / "two")))
    assert not finds(attach(host_pool("layer_first"), **place))


def test_new_weights_find_nothing_of_the_old_ones(attach: Attach, model: Path) -> None:
    """Where the update names a version. A start has the weights of the files again."""
    backend = attach(host_pool("layer_first"))
    write(backend)
    get_context().override("scheduler.weight_version", weight_version="step-1")
    assert not finds(backend)
    write(backend)
    assert finds(backend)
    start_engine(model)
    later = attach(host_pool("layer_first"))
    assert finds(later)
    get_context().override("scheduler.weight_version", weight_version="step-1")
    assert not finds(later)


def test_an_engine_in_the_index_gives_its_pages_to_others(attach: Attach) -> None:
    """Its state and a prompt's pages are told over HTTP, by tokens and salt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = attach(host_pool("layer_first"), memory="64MiB", address=f"http://127.0.0.1:{port}")
    write(backend)

    def asked(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/prefix{path}", data) as answer:
            return json.load(answer)

    tokens = list(range(PAGES * PAGE))
    assert asked("")["engine"].startswith("sglang 0.")
    assert asked("")["tiers"]["memory"]["blocks"] == PAGES
    assert asked("/lookup", {"tokens": [*tokens, 5]})["leading_tokens"] == {"memory": PAGES * PAGE}
    assert asked("/lookup", {"tokens": tokens, "cache_salt": "a"})["leading_tokens"] == {"memory": 0}
    assert asked("/lookup", {"tokens": tokens[:3]})["leading_tokens"] == {"memory": 0}
    assert asked("/pin", {"tokens": tokens})["pinned_tokens"] == {"memory": PAGES * PAGE}


def test_replicas_have_names_and_ports_of_their_own(attach: Attach) -> None:
    """By their number among the processes of the engine."""
    with get_parallel().override(dp_rank=1, launch_world_rank=1, launch_world_size=2):
        backend = attach(host_pool("layer_first"), memory="64MiB", name="gpu-1")
    assert backend._store_config.name == "gpu-1-3"


def test_the_end_of_a_process_closes_the_store(model: Path, disk: Path) -> None:
    """Also where SGLang does not: what was written is there, and nothing is complained of."""
    program = Path(__file__).with_name("ending.py")
    ended = subprocess.run(
        [sys.executable, str(program), str(model), str(disk)], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "stored\nleft:\n"
    assert "Traceback" not in ended.stderr
    assert "did not end" not in ended.stderr
