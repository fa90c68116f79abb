"""Traps that were written when the comparison of texts was finished, and pairs as near that are right to serve."""

import asyncio
import csv

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import ROOT
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text

_FILE = ROOT / "benchmarks" / "data" / "semantic" / "traps.csv"
_WORDINGS = ("{}", "Hi, {}", "{} Thanks!", "Please tell me: {}", "I have a question. {}")
# Of 405 traps ten may pass.
_MOST = 10 / 405
_METHOD = """\
Pairs of questions of nearly the same words in benchmarks/data/semantic/traps.csv, of twenty subjects and five
languages. Of a trap the answer to the first question misleads who asks the second one: numbers, units, dates, negation,
antonyms, quantifiers, roles, names, tense, code, and words that were added or removed, twenty of each. Of the others
one answer is right for both: politeness, fillers, the order of words, synonyms, spelling, articles, twenty of each.
They were written with a language model from such a description alone, when the rules that compare texts had been
chosen, measured once, and nothing was changed since. Passed are those that no veto forbids, which a policy may then
serve or not. "Several wordings" are five of the first question: its words between greetings, thanks and the like."""


async def measure(quick: bool) -> Figure:
    return await asyncio.to_thread(_measure)


def _measure() -> Figure:
    with _FILE.open(encoding="utf-8", newline="") as file:
        pairs = list(csv.DictReader(file))
    rows = []
    for label, name, target in (("0", "traps", Target("most", _MOST)), ("1", "pairs that are right to serve", None)):
        of_label = [pair for pair in pairs if pair["label"] == label]
        for what, wordings in (("one question", _WORDINGS[:1]), ("several wordings", _WORDINGS)):
            passed = dict.fromkeys(sorted({pair["kind"] for pair in of_label}), 0.0)
            for pair in of_label:
                known = [Text.of(wording.format(pair["text_a"])) for wording in wordings]
                passed[pair["kind"]] += not compare(Text.of(pair["text_b"]), known).veto
            row = Row(
                what=f"passed, of {len(of_label)} {name}: {what}",
                unit="share",
                rounds=(sum(passed.values()) / len(of_label),),
                target=target if what == "one question" else None,
                beside=(passed,),
            )
            rows.append(row)
    return Figure(figure="semantic_traps", title="Traps written afterwards", method=_METHOD, rows=tuple(rows))
