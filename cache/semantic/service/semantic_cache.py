"""The semantic cache: what is asked of it, step by step."""

import time

from cache.key import namespace_of
from cache.semantic.embedding.embedder import Embedder
from cache.semantic.messages import Answered, Ask, Evicted, Forget, Found, NotFound, Purged, Retried, Wrong
from cache.semantic.policy.policy import Policy
from cache.semantic.service.figures import Figures
from cache.semantic.service.inquiries import Inquiries, Inquiry, Serving, Servings
from cache.semantic.service.learner import Learner
from cache.semantic.service.neighbours import Neighbours, first_allowed, neighbourhood_of


class SemanticCache:
    """Finds answers to questions that were asked before in other words:

    same form → embed → neighbours → weigh → guards → decide
    """

    def __init__(
        self,
        embedder: Embedder,
        neighbours: Neighbours,
        policy: Policy,
        learner: Learner,
        figures: Figures,
        shares_purges: bool,
    ) -> None:
        self._embedder = embedder
        self._neighbours = neighbours
        self._policy = policy
        self._learner = learner
        self._inquiries = Inquiries()
        self._servings = Servings()
        self._shares_purges = shares_purges
        self.figures = figures

    async def ask(self, ask: Ask) -> Found | NotFound:
        """Raises EmbedderBusy and EmbeddingError where the question cannot be embedded."""
        self.figures.count("asked")
        repeated = self._servings.take_repeated(ask.key, time.monotonic())
        if repeated is not None:
            await self._blame(repeated)
        elif ask.most_risk > 0 and (same := self._neighbours.same_form(ask.partition, ask.text)):
            self.figures.count("normalized" if ask.serve else "observed_normalized")
            return Found(0, 1.0, layer="normalized", entry=same.entry, audit=False)
        namespace = namespace_of(ask.partition)
        with self.figures.timing("embed"):
            vector = await self._embedder.embed(ask.text)
        with self.figures.timing("search"):
            near = [
                neighbour
                for neighbour in await self._neighbours.near(ask.partition, vector)
                if self._neighbours.may_answer(neighbour.record, namespace)
            ]
        evidence, place, guard = None, None, ""
        if near:
            with self.figures.timing("guards"):
                weighed = self._policy.weigh(neighbourhood_of(near))
                place, guard = first_allowed(ask.text, near, weighed.members)
            evidence = weighed if place is not None else None
        decision = self._policy.decide(evidence, 0.0 if repeated is not None else ask.most_risk)
        entry = "" if place is None else near[place].record.entry
        number = self._inquiries.open(Inquiry(vector, evidence, entry, decision, served=decision.serve and ask.serve))
        if guard:
            self.figures.count_refusal(guard)
        if not decision.serve or evidence is None or place is None:
            similarity = near[0].similarity if near else None
            return NotFound(number, similarity, decision.risk if evidence else None, guard)
        self.figures.count("served" if ask.serve else "observed")
        if ask.serve:
            self._neighbours.records.use(entry)
            self._servings.note(Serving(ask.key, entry, evidence, decision, time.monotonic()))
        similarity, risk = near[place].similarity, decision.risk
        return Found(number, similarity, risk, layer="semantic", entry=entry, audit=decision.audit)

    async def answered(self, note: Answered) -> None:
        """A fresh answer: compare it with what was or would have been served, and keep it for the next."""
        await self._learner.hear(note, self._inquiries.close(note.inquiry))

    async def retried(self, note: Retried) -> None:
        serving = self._servings.take(note.key)
        if serving is not None:
            await self._blame(serving)

    async def wrong(self, message: Wrong) -> Evicted:
        servings = self._servings.take_of(message.entry)
        for serving in servings:
            await self._blame(serving)
        return Evicted(await self._learner.forget(message.entry), len(servings))

    async def forget(self, note: Forget) -> None:
        await self._learner.forget(note.entry)

    async def purged(self, note: Purged) -> None:
        """Remove what has been purged; with a store that gateways share, it is known from there."""
        if not self._shares_purges:
            await self._learner.discard(
                [
                    record.entry
                    for record in self._neighbours.records
                    if note.scope == "all"
                    or note.name == (record.namespace if note.scope == "namespace" else record.model)
                ]
            )

    async def _blame(self, serving: Serving) -> None:
        """Take it that what was served was wrong, because who got it says so."""
        self.figures.count("blamed")
        await self._learner.teach(serving.label())
