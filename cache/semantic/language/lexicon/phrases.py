"""Phrases that stand for one word."""

from cache.semantic.language.lexicon.opening_phrases import OPENING_PHRASES

# Left: as written, after contractions. Right: what stands for it.
_PHRASES = """
    set up = setup
    setting up = setup
    sets up = setup
    log in = login
    log into = login
    logging in = login
    logged in = login
    log on = login
    sign in = login
    sign into = login
    signing in = login
    log out = logout
    log off = logout
    sign out = logout
    sign up = register
    signing up = register
    top up = topup
    top ups = topup
    topping up = topup
    topped up = topup
    tops up = topup
    get rid of = remove
    getting rid of = remove
    find out = find
    look up = find
    look for = find
    looking for = find
    figure out = find
    work out = workout
    carry out = do
    a lot of = many
    lots of = many
    plenty of = many
    a couple of = couple
    in order to = to
    so as to = to
    due to = because
    because of = because
    in spite of = despite
    as soon as possible = asap
    at the moment = now
    at this moment = now
    at present = now
    right now = now
    these days = now
    this moment = now
    day after tomorrow = overmorrow
    day before yesterday = ereyesterday
    does it take for = for
    does it take until = until
    it takes for = for
    no longer = not
    no one = nobody
    other than = except
    apart from = except
    aside from = except
    rather than = instead
    opposed to = instead
    free of = without
    a few = several
    quite a few = many
    every other = alternate
    rent out = lease
    renting out = lease
    rents out = lease
    rented out = lease
    at least = atleast
    at most = atmost
    no more than = atmost
    not more than = atmost
    up to = atmost
    more than = over
    greater than = over
    less than = under
    fewer than = under
    in front of = front
    out of = from
    turn on = enable
    turning on = enable
    turned on = enable
    switch on = enable
    switching on = enable
    turn off = disable
    turning off = disable
    turned off = disable
    switch off = disable
    switching off = disable
    give up = stop
    go up = rise
    goes up = rise
    going up = rise
    went up = rise
    go down = fall
    goes down = fall
    going down = fall
    went down = fall
    take off = takeoff
    look after = care
    carry on = continue
    two factor authentication = 2fa
    two step verification = 2fa
    2 factor authentication = 2fa
    multi factor authentication = mfa
    united states of america = usa
    united states = usa
    the us = usa
    u s = usa
    u k = uk
    united kingdom = uk
    great britain = britain
    european union = eu
    los angeles = la
    artificial intelligence = ai
    machine learning = ml
    credit card = creditcard
    debit card = debitcard
    per cent = percent
    atm machine = atm
    cash machine = atm
    cash point = atm
    each other = eachother
    some best = best
    some of the best = best
    some of the most = most
    some of the = some
    some of = some
    on average = average
    left wing = leftwing
    right wing = rightwing
    social networking = socialnetwork
    social network = socialnetwork
    salt water = saltwater
    self harm = selfharm
    brother in law = brotherinlaw
    sister in law = sisterinlaw
    mother in law = motherinlaw
    father in law = fatherinlaw
    high school = highschool
    make money = earn money
    making money = earn money
    made money = earn money
    makes money = earn money
    mobile phone = phone
    mobile phones = phone
    cell phone = phone
    cell phones = phone
    smart phone = phone
    tv show = tvseries
    tv shows = tvseries
    tv series = tvseries
    television series = tvseries
    television show = tvseries
    deal with = handle
    dealing with = handle
    cope with = handle
    coping with = handle
    get over = overcome
    throw up = vomit
    throwing up = vomit
    threw up = vomit
    get pregnant = conceive
    high blood pressure = hypertension
    low blood pressure = hypotension
    birth control = contraception
    reduce weight = lose weight
    put on weight = gain weight
    increase weight = gain weight
    commit suicide = suicide
    committing suicide = suicide
    donald trump = trump
    barack obama = obama
    president trump = trump
    president obama = obama
    president donald trump = trump
    president barack obama = obama
    narendra modi = modi
    vladimir putin = putin
    joe biden = biden
    elon musk = musk
    brand new = new
    2 fa = 2fa
    two fa = 2fa
    step by step = stepwise
    in short = briefly
    in brief = briefly
    keep it short = briefly
    keep it brief = briefly
    short answer = briefly
    in detail = detailed
    in full detail = detailed
    in depth = detailed
    long answer = detailed
    like i am = simply
    as if i were = simply
    as if i am = simply
    in simple terms = simply
    in simple words = simply
    in simple language = simply
    in plain english = simply
    in layman's terms = simply
    in laymans terms = simply
    in one word = oneword
    in a single word = oneword
    yes or no = yesorno
    with examples = examples
    with an example = examples
    give examples = examples
    give an example = examples
    for beginners = beginner
    new york = newyork
    new york city = newyork
    new zealand = newzealand
    new jersey = newjersey
    new mexico = newmexico
    new orleans = neworleans
    new delhi = newdelhi
    new hampshire = newhampshire
    new england = newengland
    south korea = southkorea
    north korea = northkorea
    south africa = southafrica
    saudi arabia = saudiarabia
    san francisco = sanfrancisco
    san diego = sandiego
    hong kong = hongkong
"""

# "make a payment" says what the verb says.
_VERB_OF_NOUN = {
    "payment": "pay",
    "purchase": "buy",
    "transfer": "transfer",
    "reservation": "reserve",
    "booking": "book",
    "call": "call",
    "deposit": "deposit",
    "withdrawal": "withdraw",
    "appointment": "appointment",
    "complaint": "complain",
    "decision": "decide",
    "list": "list",
}
_rows = [*OPENING_PHRASES.strip().splitlines(), *_PHRASES.strip().splitlines()] + [
    f"{make} {determiner} {noun} = {verb}"
    for noun, verb in _VERB_OF_NOUN.items()
    for make in ("make", "made", "makes", "making")
    for determiner in ("a", "an", "the", "my", "")
]

# The first two words of a phrase -> (its length in words, the rest of it, what stands for it), longest first.
PHRASES: dict[tuple[str, str], list[tuple[int, tuple[str, ...], tuple[str, ...]]]] = {}
for _row in _rows:
    _left, _, _right = _row.partition("=")
    _first, _second, *_rest = _left.split()
    PHRASES.setdefault((_first, _second), []).append((2 + len(_rest), tuple(_rest), tuple(_right.split())))
for _choices in PHRASES.values():
    _choices.sort(reverse=True)
