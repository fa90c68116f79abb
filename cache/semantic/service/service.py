"""The composition root of the process: builds the semantic cache, in the order in which it starts."""

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.semantic.embedding.embedder import Embedder, Embedders, open_embedder, open_embedders
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.model_files import DEFAULT
from cache.semantic.embedding.server import EmbeddingServer
from cache.semantic.index.index import VectorIndex
from cache.semantic.inspection.decisions import Decisions
from cache.semantic.inspection.what_if import WhatIf
from cache.semantic.judge.embedding_judge import EmbeddingJudge, coefficients_digest
from cache.semantic.judge.error_rates import PRIOR_ERROR, ErrorRates
from cache.semantic.judge.judge import Judge
from cache.semantic.judge.llm_judge import open_llm_judge
from cache.semantic.messages import Refused, Stats
from cache.semantic.normal_form.english import load as load_words
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import Policy, ThresholdPolicy
from cache.semantic.service.answers import Answers
from cache.semantic.service.config import EMBEDDING, Config
from cache.semantic.service.labels import Labels
from cache.semantic.service.learner import Learner
from cache.semantic.service.neighbours import Neighbours
from cache.semantic.service.record_log import RecordLog
from cache.semantic.service.records import Record
from cache.semantic.service.semantic_cache import SemanticCache
from cache.semantic.service.server import SHARE_FOR_ASKING, Service
from cache.semantic.service.sharing import Sharing
from cache.semantic.wording.language import load as load_languages
from cache.stores.encryption import encryption_with
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import open_redis_store, open_topology
from telemetry.tracing.opening import open_tracing

_SERVICE = "keepgate-semantic-cache"
_STORE_DEADLINE = 2.0
_TICK = 0.5
_STUCK_SECONDS = 1.0
# Of the gateway's deadline: a lookup that would wait longer for the embedding model is refused at once.
_SHARE_FOR_WAITING = 0.5


@asynccontextmanager
async def open_service(config: Config, load: Callable[[str, str | None], Encoder]) -> AsyncIterator[Service]:
    """A service that listens at once and answers as soon as its model is there.

    `load` blocks until it has loaded a model, by its name or folder and its prompt. Raises ModelUnusable if the
    configured model is invalid, and TracingUnavailable if traces cannot be exported.
    """
    async with contextlib.AsyncExitStack() as stack:
        # No share of its own: a trace is begun by the gateway.
        tracing = await stack.enter_async_context(
            open_tracing(_SERVICE, endpoint=config.traces_endpoint, file=config.traces_file, share=0.0)
        )
        service = Service(config, tracing)
        await stack.enter_async_context(service.listening())
        await asyncio.to_thread(load_words)
        await asyncio.to_thread(load_languages)
        source: EmbeddingServer | Callable[[], Encoder] = functools.partial(load, config.model, config.model_prompt)
        if config.model_url:
            source = EmbeddingServer(config.model_url, config.model, config.model_key, config.model_prompt or "")
        waiting, asking = config.deadline * _SHARE_FOR_WAITING, config.deadline * SHARE_FOR_ASKING
        embedders = await stack.enter_async_context(open_embedders(source, waiting, asking))
        judging = embedders.background
        is_default = config.model == DEFAULT and not config.model_url and config.model_prompt is None
        if config.judge == EMBEDDING and not is_default:  # its coefficients are fitted to the default model
            encoder = await asyncio.to_thread(load, DEFAULT, None)
            judging = await stack.enter_async_context(open_embedder(encoder, patient=True))
        await stack.enter_async_context(_running(config, embedders, judging, service))
        yield service


@asynccontextmanager
async def _running(config: Config, embedders: Embedders, judging: Embedder, service: Service) -> AsyncIterator[None]:
    embedder, patient, model = embedders.lookups, embedders.background, embedders.lookups.model
    async with contextlib.AsyncExitStack() as stack:
        encryption = encryption_with(config.encryption_keys)
        store, shared = None, None
        if config.redis:
            redis = await stack.enter_async_context(open_redis_store(config.redis, _STORE_DEADLINE, encryption))
            store = ExactCache(MemoryStore(0), redis, keep_stale=0.0)  # the answers that gateways keep
            topology = await stack.enter_async_context(open_topology(config.redis))
            shared = RecordLog(topology, model.fingerprint, model.dimensions, encryption)
        judge: Judge = EmbeddingJudge(judging.embed)
        if config.judge != EMBEDDING:
            judge = await stack.enter_async_context(open_llm_judge(config.judge, config.judge_model, config.judge_key))
        policy: Policy = ThresholdPolicy(config.threshold)
        what_if = None
        if config.policy == "budget":
            chance = random.Random()  # noqa: S311  # which hits are audited is no secret
            policy = BudgetPolicy(config.delta, PRIOR_ERROR, chance, config.audit_share)
            what_if = WhatIf(config.delta, PRIOR_ERROR)
        decisions = Decisions(what_if, config.show_questions)
        is_current = functools.partial(_is_current, store)
        neighbours = Neighbours(
            VectorIndex(model.dimensions), is_current, config.published, config.confirmations, decisions.forget_texts
        )
        stack.push_async_callback(asyncio.to_thread, neighbours.close)
        judged_by = judge_name(config, judging.model.fingerprint)
        labels = Labels(policy, ErrorRates(judge.same_above), f"{config.policy}:{model.fingerprint}", judged_by)
        judge_share = 1.0 if config.judge == EMBEDDING else config.judge_share
        learner = Learner(patient, neighbours, Answers(store), judge, labels, config.capacity, judge_share, shared)
        cache = SemanticCache(embedder, learner, decisions, shares_purges=store is not None)
        works = [each.model.breaker.watch() for each in embedders]
        works += [learner.work(), _maintain(cache, learner, store, config)]
        sharing = None
        if shared is not None and store is not None:
            sharing = Sharing(shared, learner, cache.report_wrong_answer)
            with contextlib.suppress(StoreUnavailable):  # it is learned later, by follow_purges
                await store.sync_purges()
            works += [sharing.follow(), sharing.reembed(), store.follow_purges()]
            works += [shared.write(), shared.breaker.watch()]

        def describe() -> Stats | Refused:
            if not config.model_url and embedder.seconds_under_way > _STUCK_SECONDS:
                return Refused("the embedding model does not answer")
            return Stats(_figures(learner, judge, embedders, sharing))

        async with asyncio.TaskGroup() as group:  # a task that fails ends the process, which the gateway starts again
            running = [group.create_task(work) for work in works]
            await service.begin(cache, describe)
            try:
                yield
            finally:
                service.end()
                for task in running:
                    task.cancel()
        if sharing is not None:
            with contextlib.suppress(StoreUnavailable):
                await sharing.shared.flush()
                await sharing.save()


def _is_current(store: ExactCache | None, record: Record) -> bool:
    """Whether a record is from after the last purge; without a store the gateway reports purges."""
    return store is None or (
        record.generation == store.generation(record.namespace, record.model)
        and record.created >= store.purged_before("semantic")
    )


async def _maintain(cache: SemanticCache, learner: Learner, store: ExactCache | None, config: Config) -> None:
    """Removes expired and purged records, and those of others beyond this process's capacity."""
    purges = 0
    while True:
        await asyncio.sleep(_TICK)
        await learner.neighbours.bound(config.capacity)
        if store is not None and store.purges != purges:
            purges = store.purges
            await learner.discard(lambda record: not _is_current(store, record))
            cache.decisions.forget_texts()


def _figures(learner: Learner, judge: Judge, embedders: Embedders, sharing: Sharing | None) -> dict[str, object]:
    index, labels = learner.neighbours.index, learner.labels
    return {
        "model": embedders.lookups.model.name,
        "embedder": embedders.figures(),
        "entries": len(learner.neighbours.records),
        "partitions": index.partitions,
        "bytes": index.bytes,
        "recall_at_1": index.recall.at_1,
        "recall_compared": index.recall.compared,
        "loaded": sharing is None or sharing.loaded,
        "reembedding": {"left": 0, "done": 0, "failed": 0} if sharing is None else sharing.reembedding(),
        "writes_dropped": 0 if sharing is None else sharing.shared.dropped,
        "corrupt_records": 0 if sharing is None else sharing.shared.corrupt,
        "labels_of_other_versions": labels.of_other_versions.total(),
        "judge_failures": judge.failures,
        "judge": labels.errors.figures(),
        "policy": labels.policy.figures(),
        "reliability": labels.policy.reliability(),
        **learner.figures.as_dict(),
    }


def judge_name(config: Config, fingerprint: str) -> str:
    """Under which its judged pairs are shared: pairs of another judge say nothing of this one's errors.

    `fingerprint` is that of the embedding model with which it judges.
    """
    if config.judge == EMBEDDING:
        return f"judge:{config.judge}:{fingerprint}:{coefficients_digest()}"
    return f"judge:{config.judge}:{config.judge_model or fingerprint}"
