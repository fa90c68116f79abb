"""The checks of the engine and the semantic cache, in the programs that would serve."""

import os
from pathlib import Path

import pytest

from gateway.commands.doctor import children
from gateway.commands.doctor.children import check_engine, check_semantic_cache
from gateway.settings.backend import BackendSettings
from gateway.settings.cache import SemanticSettings
from gateway.settings.settings import Settings


async def test_the_engine_is_not_looked_at_where_upstreams_are_named() -> None:
    """Its process is not even started."""
    assert await check_engine(Settings(upstreams=("mock:",), model="/no/such/folder")) == []
    assert await check_semantic_cache(Settings()) == []


async def test_a_missing_model_is_a_problem_and_the_kernels_are_tried_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without a model is named; without a compiler torch serves, which is a warning with the way out."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, kernels = await check_engine(Settings(model=str(tmp_path)))
    assert (model.check, model.status, "no config.json" in model.summary) == ("model", "problem", True)
    assert (kernels.check, kernels.status) == ("engine kernels", "warning")
    assert "no C++ compiler" in kernels.summary
    assert "g++" in kernels.advice


async def test_an_option_that_the_engine_refuses_is_a_problem() -> None:
    """A device that is not there is told by the engine's own words, with its memory and its kernels."""
    findings = await check_engine(Settings(backend=BackendSettings(device="cuda", kv_dtype="int8")))
    said = {each.check: each for each in findings}
    assert said["model"].status == "ok"
    if "engine device" in said and said["engine device"].status == "ok":
        return  # there is one
    assert "--device cuda" in said["engine device"].summary


async def test_a_check_that_crashes_is_a_problem_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends with a traceback is a finding of one line that says how to see the rest."""
    (found,) = await children._run("engine", ["backend.commands.no_such_module"], {})
    assert (found.check, found.status) == ("engine", "problem")
    assert "No module named backend.commands.no_such_module" in found.summary
    assert "-m backend.commands.no_such_module" in found.advice


async def test_an_engine_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch and without an upstream nothing can serve."""
    monkeypatch.setattr("gateway.commands.doctor.children.importlib.util.find_spec", lambda name: None)
    (engine,) = await check_engine(Settings())
    assert (engine.status, "keepgate[backend]" in engine.advice) == ("problem", True)
    (semantic,) = await check_semantic_cache(Settings(semantic=SemanticSettings(mode="on")))
    assert (semantic.status, "keepgate[semantic]" in semantic.advice) == ("problem", True)


async def test_an_embedding_model_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    """The message names the setting and the folder."""
    (found,) = await check_semantic_cache(Settings(semantic=SemanticSettings(mode="on", model=str(tmp_path))))
    assert (found.check, found.status) == ("semantic cache", "problem")
    assert f"semantic.model: the folder '{tmp_path}'" in found.summary


async def test_a_model_without_a_reference_is_only_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is there; nothing is computed, and the compiled encoder is built or falls back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    there, native = await check_semantic_cache(Settings(semantic=SemanticSettings(mode="observe")))
    assert (there.status, "is compared with torch at the first start" in there.summary) == ("ok", True)
    assert (native.status, "no C++ compiler" in native.summary) == ("warning", True)
    assert [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".npy")] == []
