"""The overlays, rendered once."""

import functools

import pytest

from tests.deploy.kustomization import KUBERNETES, OVERLAYS, Rendering


@functools.cache
def _rendered(name: str) -> Rendering:
    return Rendering(KUBERNETES / "overlays" / name)


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Rendering:
    return _rendered(request.param)


@pytest.fixture
def dev() -> Rendering:
    return _rendered("dev")
