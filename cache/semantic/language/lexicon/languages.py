"""Function words that tell a language written in Latin letters from English; none of them is an English word."""

from cache.semantic.language.lexicon import words

_WORDS = {
    "es": "el los las una unos unas del que qué cómo cuál cuáles dónde cuándo quién por para con sin pero está están "
    "son ser es y o mi mis tu tus su sus muy más hay puedo puede quiero hacer hola gracias como cual donde "
    "cuando quien porque",
    "fr": "le les une des du de la et est sont que qui quoi où quand comment pourquoi quel quelle quels quelles dans "
    "pour avec sans sur je tu il elle nous vous ils elles mon ma mes ton ta tes ses ce cette ces pas ne bonjour "
    "merci peut puis aux",
    "de": "der das dem den ein eine einen einem einer und ist sind nicht ich du er sie wir ihr mein meine dein wie "
    "wer wo wann warum welche welcher welches für mit ohne auf von zu zum zur im kann können bitte danke hallo "
    "auch aber oder gibt",
    "it": "il lo gli una uno della dello dei degli delle che chi dove quando perché come quale quali sono è con senza "
    "per non mi mio mia tuo tua suo sua ciao grazie posso puoi fare di nel nella",
    "pt": "os um uma uns umas do da dos das no na nos nas que quem onde quando porque qual quais como com sem para "
    "por não sim é são está meu minha seu sua obrigado obrigada olá você eu posso fazer",
    "nl": "het een en van ik jij je hij zij wij jullie niet wat wie waar wanneer waarom hoe welke voor met zonder kan "
    "kunnen mijn zijn heeft hebben dat deze bedankt hallo maar",
}
# These are words of English as well and tell nothing.
ENGLISH_TOO = words(
    "a o y no me as do in an on is we the to by so or it of es des du de la le los las ma ton mi son lo un per van "
    "si tu come den die men war hat also am was will um el da na est"
)

# Form -> the languages it is a function word of.
LANGUAGES: dict[str, tuple[str, ...]] = {}
for _language, _list in _WORDS.items():
    for _form in _list.split():
        if _form not in ENGLISH_TOO:
            LANGUAGES[_form] = (*LANGUAGES.get(_form, ()), _language)
