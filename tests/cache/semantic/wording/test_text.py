"""What is read off a question."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.semantic.wording.language import language_of
from cache.semantic.wording.text import Text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Why isn\u2019t my card working?", "why is not my card working"),
        ("Don't send $20.50 to C++!", "do not send $ 20.50 to c + +"),
        ("L'État, c'est moi", "l état c est moi"),
        ("GRÜSSE aus Köln", "grüsse aus köln"),
        ("東京の天気は?", "東 京 の 天 気 は"),
        ("「待处理」、是什么意思？", "待 处 理 是 什 么 意 思"),  # noqa: RUF001
        ("Как включить звук?", "как включить звук"),
        ("", ""),
    ],
)
def test_words_are_found_in_any_script(question: str, words: str) -> None:
    """Numbers and symbols are words; in scripts that do not divide words, each sign is one."""
    assert " ".join(Text.of(question).words) == words.casefold()


@given(st.text())
@example("a\u0345")  # the one mark that case folding makes a letter
def test_any_text_can_be_read(question: str) -> None:
    """No word is empty or has white space in it, and case is no difference."""
    text = Text.of(question)
    assert all(word and not any(map(str.isspace, word)) for word in text.words)
    assert text.words == Text.of(question.casefold()).words


@pytest.mark.parametrize(
    ("question", "parts"),
    [
        ('What does "break a leg" mean?', ("break a leg",)),
        ("Translate to French: Good night!", ("Good night",)),
        ("Summarize this\nfirst line\nsecond line", ("first line second line",)),
        ("Email rob@example.com or see https://example.com/a?b=1", ("rob@example.com", "https://example.com/a?b=1")),
        ("What does max_tokens do in parseJson?", ("max_tokens", "parseJson")),
        ("What does `def f(x): return x` do?\n```\nf(1)\n```", ("What does `def f(x): return x` do?\n```\nf(1)\n```",)),
        ("「待处理」和“已完成”有什么区别？", ("待处理", "已完成")),  # noqa: RUF001
        ("翻译成法语：晚安！", ("晚安",)),  # noqa: RUF001
        ("用PayPal怎么充值？见https://example.com/a，谢谢", ("PayPal", "https://example.com/a")),  # noqa: RUF001
        ("我要订一张今晚7：30的桌子", ()),  # noqa: RUF001
        ("It's John's card, isn't it?", ()),
        ("How do I reset my PIN?", ()),
    ],
)
def test_what_must_be_equal_letter_for_letter_is_found(question: str, parts: tuple[str, ...]) -> None:
    """Quotations, what follows a colon or the first line, addresses, identifiers; code as a whole."""
    assert Text.of(question).verbatim == parts


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the weather like in Berlin today?", "en"),
        ("Wie wird das Wetter heute in Berlin?", "de"),
        ("¿Cómo puedo activar mi tarjeta de crédito?", "es"),
        ("東京の天気は?", "ja"),
        ("cancel", None),
        ("", None),
    ],
)
def test_a_language_is_named_where_a_text_shows_it(text: str, language: str | None) -> None:
    """A word or two may be of many languages."""
    assert language_of(text) == language


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("what does US mean?", "what does US mean"),
        ("what does us mean?", "what does us mean"),
        ("Is IT down?", "is IT down"),
        ("When is it May?", "when is it May"),
        ("May I pay? May I wait?", "may i pay may i wait"),
        ("WHAT DOES US MEAN?", "what does us mean"),
        ("Can You Help Me Please?", "can you help me please"),
        ("Where is my PIN for Apple Pay?", "where is my pin for apple pay"),
    ],
)
def test_a_capital_may_make_another_word_of_a_frequent_one(question: str, words: str) -> None:
    """Of an acronym or a name within a sentence, and not where everything has capitals."""
    assert " ".join(Text.of(question).words) == words


def test_reading_takes_time_in_proportion_to_the_length() -> None:
    """Texts that make patterns look back are read as others are: ten times the text takes no hundred times the time."""

    def seconds(text: str) -> float:
        began = time.perf_counter()
        Text.of(text)
        return time.perf_counter() - began

    for hostile in ('"' * 1000, "a_" * 1000, "SELECT " * 300, "x: " * 700, "(" * 2000, "'a " * 700):
        assert min(seconds(hostile * 10) for _ in range(3)) < 60 * max(min(seconds(hostile) for _ in range(3)), 1e-4)
