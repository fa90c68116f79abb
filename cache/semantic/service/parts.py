"""The parts that a setting chooses."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cache.semantic.embedding.embedder import Embedder
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.judge import Judge
from cache.semantic.judge.llm_judge import open_llm_judge
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import Policy
from cache.semantic.policy.posterior import JudgeError
from cache.semantic.policy.threshold import ThresholdPolicy
from cache.semantic.policy.vcache import VCachePolicy
from cache.semantic.service.config import Config


def make_policy(config: Config, judge: Judge, chance: random.Random) -> Policy:
    """The decision policy; `chance` draws what it audits."""
    match config.policy:
        case "budget":
            return BudgetPolicy(config.delta, judge.error, chance, config.audit_share)
        case "vcache":
            return VCachePolicy(config.delta, chance)
        case "threshold":
            return ThresholdPolicy(config.threshold)


@asynccontextmanager
async def make_judge(config: Config, embedder: Embedder) -> AsyncIterator[Judge]:
    """Who says whether two answers are the same: a model behind a URL where one is named, else their embeddings."""
    if config.judge_url:
        error = JudgeError(config.judge_recall, config.judge_false_same)
        async with open_llm_judge(config.judge_url, config.judge_model, config.judge_key, error=error) as judge:
            yield judge
    else:
        yield EmbeddingJudge(embedder)
