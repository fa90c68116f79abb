"""Which models and settings of vLLM the connector refuses, on stand-ins for vLLM's configuration."""

import ast
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefix_store.codecs.registry import codec_named
from prefix_store.connectors import vllm_support
from prefix_store.connectors.vllm_support import check_codecs, check_setup, check_version
from prefix_store.store.config import StoreConfig


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class MLAAttentionSpec(FullAttentionSpec):
    """Named as vLLM's."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """Named as vLLM's: layers of one kind that differ in size."""


class MambaSpec(SimpleNamespace):
    """Named as vLLM's."""


def group(spec: Any = None) -> Any:
    return SimpleNamespace(kv_cache_spec=FullAttentionSpec(sliding_window=None) if spec is None else spec)


def setup(*groups: Any, **changes: Any) -> tuple[Any, Any]:
    """A ``VllmConfig`` and a ``KVCacheConfig``; changes are named ``part__field``."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="a/model", is_encoder_decoder=False),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(),
        speculative_config=None,
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part) if field else config, field or part, value)
    return config, SimpleNamespace(kv_cache_groups=list(groups) or [group()])


@pytest.mark.parametrize("spec", [FullAttentionSpec(), MLAAttentionSpec(attention_chunk_size=None)])
def test_full_attention_is_taken(spec: Any) -> None:
    """Blocks that fail to load are computed, though vLLM would fail the request."""
    config, caches = setup(group(spec))
    check_setup(config, caches)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_without_a_cache_are_taken(method: str) -> None:
    """They change no block."""
    check_setup(*setup(speculative_config=SimpleNamespace(method=method)))


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ([], {"model_config__is_encoder_decoder": True}, "a/model has an encoder"),
        ([group(), group(MambaSpec())], {}, r"a/model is a hybrid model.*FullAttentionSpec, MambaSpec"),
        ([group(FullAttentionSpec(sliding_window=4096))], {}, "a/model has layers with sliding_window 4096"),
        (
            [group(FullAttentionSpec(attention_chunk_size=8192))],
            {},
            "a/model has layers with attention_chunk_size 8192",
        ),
        (
            [group(UniformTypeKVCacheSpecs(kv_cache_specs={"1": FullAttentionSpec(sliding_window=512)}))],
            {},
            "a/model has layers with sliding_window 512",
        ),
        ([group(MambaSpec())], {}, "a/model has a KV cache of MambaSpec; expected full attention"),
        ([], {"load_config__load_format": "dummy"}, "--load-format dummy"),
        ([], {"cache_config__calculate_kv_scales": True}, "--calculate-kv-scales"),
        ([], {"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size 2: expected 1"),
        ([], {"parallel_config__decode_context_parallel_size": 4}, "--decode-context-parallel-size 4: expected 1"),
        ([], {"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2: expected 1"),
        ([], {"speculative_config": SimpleNamespace(method="eagle3")}, "--speculative-config: method is eagle3"),
    ],
)
def test_what_cannot_be_stored_is_refused(groups: list[Any], changes: dict[str, Any], message: str) -> None:
    """The message names the model or the option, and what is expected."""
    with pytest.raises(ValueError, match=message) as raised:
        check_setup(*setup(*groups, **changes))
    assert "expected" in str(raised.value)


def test_lossy_codecs_are_refused() -> None:
    """They would read the numbers of a block, whose order is the kernel's own."""
    check_codecs(StoreConfig(memory_bytes=2**20))
    with pytest.raises(ValueError, match="memory_codec is int8, expected plain"):
        check_codecs(StoreConfig(memory_bytes=2**20, memory_codec=codec_named("int8")))


def test_a_vllm_without_the_interface_is_refused() -> None:
    """Here there is none at all; the message says which versions were tested."""
    with pytest.raises(ValueError, match=r"vLLM 0\.9\.1 has no vllm\..*KVConnectorBase_V1; .* tested with 0\.32"):
        check_version("0.9.1")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bool]]:
    """The interface as modules of classes, whose names a test may remove before it checks them."""
    classes: dict[str, dict[str, bool]] = {}
    for place, names in vllm_support._NEEDED.items():
        module, _, class_name = place.partition(":")
        classes[class_name] = dict.fromkeys(names, True)
        found = ModuleType(module)
        found.__getattr__ = lambda name: type(name, (), classes[name])  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, module, found)
    return classes


def test_a_part_of_the_interface_that_is_gone_is_named(modules: dict[str, dict[str, bool]]) -> None:
    """Not at the first request: when vLLM starts."""
    del modules["KVConnectorBase_V1"]["get_finished"]
    with pytest.raises(ValueError, match=r"has no KVConnectorBase_V1\.get_finished; .* tested with 0\.32"):
        check_version("0.40.0")


@pytest.mark.parametrize(
    ("class_name", "name"),
    [(place.partition(":")[2], name) for place, names in vllm_support._NEEDED.items() for name in names],
)
def test_each_name_is_checked(modules: dict[str, dict[str, bool]], class_name: str, name: str) -> None:
    """Whichever is gone, the message has it."""
    del modules[class_name][name]
    with pytest.raises(ValueError, match=rf"has no {class_name}\.{name};"):
        check_version("0.32.0")


def test_what_the_connector_implements_is_checked() -> None:
    """All its public methods are vLLM's: one that vLLM calls no more would be silence."""
    source = Path(inspect.getfile(vllm_support)).with_name("vllm.py").read_text()
    classes = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]
    (connector,) = (each for each in classes if each.name == "KeepgateConnector")
    methods = {each.name for each in connector.body if isinstance(each, ast.FunctionDef)}
    needed = vllm_support._NEEDED["vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"]
    assert {name for name in methods if not name.startswith("_")} <= set(needed)


def test_what_a_class_sets_when_it_is_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's requests declare nothing."""
    module = ModuleType("a_module")
    monkeypatch.setitem(sys.modules, "a_module", module)
    monkeypatch.setattr(vllm_support, "_NEEDED", {"a_module:Request": ("cache_salt",)})

    class Request:
        def __init__(self) -> None:
            self.cache_salt = ""

    class Other:
        def __init__(self) -> None:
            self.salt = ""

    module.Request = Request  # type: ignore[attr-defined]
    check_version("0.32.0")
    module.Request = Other  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"has no Request\.cache_salt"):
        check_version("0.32.0")


@pytest.mark.parametrize(("version", "warnings"), [("0.32.0", 0), ("0.32.4", 0), ("0.33.0", 1), ("0.320.0", 1)])
def test_a_version_that_was_not_tested_is_a_warning(
    modules: dict[str, dict[str, bool]], caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    """It may work: vLLM starts."""
    check_version(version)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert all(version in record.message and "0.32" in record.message for record in caplog.records)
