"""Words on the form of an answer: its length, format, style, and kind of text. Each row is one form."""

_FORMS = """
    brief briefly concise concisely shortly succinct succinctly tldr
    detailed thorough thoroughly comprehensive comprehensively extensively indepth
    sentence sentences
    paragraph paragraphs
    bullet bullets bulleted bulletpoint
    table tabular
    stepwise
    oneword
    yesorno
    examples
    json
    yaml
    xml
    csv
    markdown
    html
    latex
    pseudocode
    essay
    poem poetry
    haiku
    limerick
    sonnet
    rap
    story tale
    joke
    tweet
    letter
    speech
    script
    outline
    summary summarize summarise
    simply eli layman laymans
    beginner beginners
    formal formally
    informal informally casual casually
    sarcastic sarcastically
    humorous funny hilarious
    diagram
    emoji emojis
    rhyme rhyming rhymes
    verbatim
"""
FORMS: dict[str, str] = {form: row.split()[0] for row in _FORMS.strip().splitlines() for form in row.split()}
