"""Opens the speculator of a server: measures its steps, and loads its draft model."""

from __future__ import annotations

from pathlib import Path

from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import Batching, EngineConfig
from backend.errors import ModelError
from backend.model import ServedModel, load_model
from backend.model_loader.source import resolve_model
from backend.runners.warm_up import warm_up
from backend.speculation.draft_model import DraftModel
from backend.speculation.medusa import MedusaHeads, load_medusa
from backend.speculation.speculator import MAX_DRAFT_TOKENS, AdaptiveSpeculator
from backend.speculation.step_costs import measure


def open_speculator(model: ServedModel, engine: EngineConfig, progress: Progress) -> AdaptiveSpeculator | None:
    """The speculator of a model that is warm; None: it is switched off.

    Raises:
        ModelError: the draft model cannot be loaded, or does not fit the model.
    """
    if not engine.speculation:
        return None
    costs = measure(model.runner)
    return AdaptiveSpeculator(
        costs,
        _draft_model(model, engine, progress) if engine.draft_model else None,
        _medusa(model, engine.medusa, progress) if engine.medusa is not None else None,
    )


def _medusa(model: ServedModel, directory: Path, progress: Progress) -> MedusaHeads:
    shortest = min((window for window in model.config.windows if window), default=None)
    if shortest is not None and shortest <= MAX_DRAFT_TOKENS:
        raise ModelError(
            f"--medusa: not with an attention window of {shortest} tokens, which a draft may be longer than"
        )
    config = model.config
    try:
        weights = load_medusa(directory, model.directory, config.hidden_size, config.vocab_size)
    except ModelError as error:
        raise ModelError(f"--medusa: {error}") from error
    progress(f"{len(weights.blocks)} heads of {len(weights.token_ids)} tokens propose trees")
    return MedusaHeads(weights)


def _draft_model(model: ServedModel, engine: EngineConfig, progress: Progress) -> DraftModel:
    if model.config.attention_window is not None:
        raise ModelError("--draft-model: not with a model all of whose layers have an attention window")
    settings = EngineConfig(
        kv_blocks=model.runner.num_blocks,
        max_batch=engine.max_batch,
        max_context=model.max_context,
        step_tokens=engine.step_tokens,
        batching=Batching(),
        threads=engine.threads,
        dtype=engine.dtype,
        device=engine.device,
    )
    try:
        draft = load_model(resolve_model(engine.draft_model, progress), settings, progress)
    except ModelError as error:
        raise ModelError(f"--draft-model: {error}") from error
    if draft.tokenizer.fast.get_vocab() != model.tokenizer.fast.get_vocab():
        raise ModelError(f"--draft-model: {draft.name} has another vocabulary than {model.name}, expected the same one")
    if draft.max_context < model.max_context:
        raise ModelError(
            f"--draft-model: {draft.name} has a context of {draft.max_context} tokens, expected at least "
            f"{model.max_context} (--max-context)"
        )
    warm_up(draft.runner, draft.tokenizer.token_bytes, draft.max_context)
    progress(f"{draft.name} writes drafts with {draft.runner.name}")
    return DraftModel(draft.runner, model.config.vocab_size)
