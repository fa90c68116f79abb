"""Texts for comparing two runtimes of one model: short to beyond the limit, with unusual characters."""

import numpy as np

from cache.semantic.embedding.encoder import Encoder, Vectors

MIN_COSINE = 0.9999

_SENTENCE = "Where is my card, and why was I charged 12.50 for it twice on the 3rd of May? "
_SHORT = (
    "",
    "a",
    " leading and trailing space ",
    "How do I top up my account?",
    "HOW DO I TOP UP MY ACCOUNT?",
    "naïve café, Ünïcödé ﬁne print, \uff21 fullwidth letter",
    "我的银行卡在哪里\uff1f 今日はいい天気ですね。",
    "Где моя карта? أين بطاقتي؟ मेरा कार्ड कहाँ है",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301\u200b\u00ad\x00\x07 \ufffd",
    "[CLS] [SEP] [MASK] <s> </s> <|endoftext|> ##ing",
    "def f(x):\n\treturn x[::-1]  # != y\r\n",
    "supercalifragilisticexpialidocious" * 8,
)


def reference_texts(longest: int | None) -> list[str]:
    """The texts, for a model that reads `longest` tokens."""
    words = (longest or 512) + 40
    repeated = _SENTENCE * (words // len(_SENTENCE.split()) + 1)
    return [*_SHORT, repeated[: words // 2], repeated[: 2 * words], repeated]


def lowest_cosine(encoder: Encoder, texts: list[str], expected: Vectors) -> float:
    """The lowest cosine between an encoder's vectors and the expected ones, float32 [len(texts), dimensions].

    Each text is computed alone and among all others. 0 if the shapes differ or only one vector is NaN; a text that is
    NaN in both agrees.
    """
    together, alone = encoder.encode(texts), np.vstack([encoder.encode([text]) for text in texts])
    lowest = 1.0
    for vectors in (together, alone):
        if vectors.shape != expected.shape or not (np.isnan(vectors) == np.isnan(expected)).all():
            return 0.0
        cosines = (vectors.astype(np.float64) * expected).sum(axis=1)
        lowest = min(lowest, float(np.min(cosines, where=~np.isnan(cosines), initial=1.0)))
    return lowest
