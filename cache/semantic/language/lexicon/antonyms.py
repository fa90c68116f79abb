"""Axes with two sides: a question about one side is not answered by the other.

A row is an axis, its sides are divided by a bar. A word may lie on several axes. Words are base forms.
"""

from cache.semantic.language.lexicon import in_order

_AXES = """
    enable activate unlock unfreeze | disable deactivate lock freeze
    unblock | block
    buy purchase | sell sale
    long | short
    call | put
    bull bullish | bear bearish
    increase raise grow gain rise climb upgrade boost | reduce decrease lower shrink fall drop decline downgrade cut
    rise up | fall down
    up upper upward | down lower downward downstairs
    on | off
    in inside into indoor inbound | out outside outdoor outbound
    login checkin | logout checkout
    install | uninstall remove
    add insert include append attach | remove delete exclude subtract detach
    open | close shut
    start begin launch | stop end finish cease quit kill terminate
    pause | resume
    allow permit let | forbid ban prohibit prevent deny block disallow
    accept approve | reject decline deny refuse
    deposit | withdraw
    lend lender lending | borrow borrower borrowing
    give | take
    send sender | receive recipient receiver
    send | receive
    pay payer | payee
    employer | employee
    landlord | tenant renter
    parent | child
    teacher | student pupil
    doctor | patient
    buyer customer | seller vendor
    husband | wife
    father | mother
    brother | sister
    son | daughter
    boy | girl
    man male men | woman female women
    king | queen
    uncle | aunt
    win winner victory | lose loser defeat
    profit gain earn | loss lose
    credit creditcard | debit debitcard
    bid | ask
    import | export
    upload | download
    push | pull
    encrypt | decrypt
    encode | decode
    compress zip | decompress unzip extract
    serialize | deserialize
    mount | unmount
    subscribe | unsubscribe
    follow | unfollow
    friend | unfriend enemy
    mute | unmute
    read | write
    input | output
    client | server
    frontend | backend
    public | private
    internal | external
    local | remote
    domestic | international foreign
    import | export
    before prior pre | after post
    early earlier earliest | late later latest
    first | last
    next upcoming | previous last
    past | future
    old older oldest | new newer newest
    young younger youngest | old older oldest
    ancient | modern
    more | less fewer
    most | least fewest
    many | few
    all every always | some sometimes
    all every each | any
    few | several
    before after | during while whilst
    since | until till
    and | or
    over above | under below beneath
    atleast | atmost
    minimum min lowest | maximum max highest
    high higher | low lower
    tall taller tallest | short shorter shortest
    big bigger biggest large larger largest | small smaller smallest
    long longer longest | short shorter shortest
    wide broad | narrow
    thick | thin
    deep | shallow
    heavy heavier | light lighter
    strong stronger | weak weaker
    fast faster fastest quick | slow slower slowest
    hot hotter hottest warm | cold colder coldest cool
    wet | dry
    hard harder hardest difficult | easy easier easiest
    hard | soft
    rich | poor
    cheap cheaper cheapest | expensive dearer
    good better best great | bad worse worst terrible
    pro advantage benefit upside | con disadvantage drawback downside risk
    safe | dangerous hazardous
    healthy | sick
    right | left
    right correct true | wrong incorrect false
    true | false
    north northern | south southern
    east eastern | west western
    front | back rear
    top | bottom
    horizontal | vertical
    row | column
    left | right
    arrive arrival | depart departure leave
    come | go
    enter entry entrance | exit
    push | pull
    push | pop
    ascend ascending | descend descending
    day | night
    morning | evening afternoon night
    summer | winter
    sunrise | sunset
    love like | hate dislike
    friend | enemy
    war | peace
    live alive life | die death
    birth born | death die
    pass | fail
    success succeed successful | failure fail
    work working | broken fail
    defend defense | attack offense
    guilty | innocent
    legal | illegal
    plaintiff | defendant
    mandatory required compulsory obligatory | optional voluntary
    temporary temporarily | permanent permanently
    automatic automatically | manual manually
    online | offline
    synchronous sync | asynchronous async
    static | dynamic
    mutable | immutable
    single | multiple
    single | double
    single unmarried | marry
    physical | virtual
    real | fake
    acid acidic | alkaline base basic
    positive plus | negative
    even | odd
    maximize | minimize
    maximise | minimise
    expand | collapse
    show display | hide
    attract | repel
    gain | lose
    save | spend
    save | delete
    keep retain | discard remove delete
    fixed | variable adjustable floating
    gross | net
    income revenue | expense deduction deductible
    individual | joint group
    full | empty
    full | part
    fulltime | parttime
    major | minor
    senior | junior
    adult | child kid baby infant
    human | animal
    prefix | suffix
    upper uppercase | lower lowercase
    ceiling | floor
    numerator | denominator
    odd | even
    row | column
    sum add | subtract difference
    multiply | divide
    integral integrate | derivative differentiate
    verse | prose
    analog | digital
    wired | wireless
    hardware | software
    vegetarian vegan | meat
    raw | cook
    fresh | frozen stale
    sweet | sour salty bitter
    hyper hypertension | hypotension
    hyperthyroidism | hypothyroidism
    hyperglycemia | hypoglycemia
    tachycardia | bradycardia
    benign | malignant
    acute | chronic
    systolic | diastolic
    bacterial | viral
    constipation | diarrhea
    cause | prevent cure treat
    cause | effect
    cause | symptom
    symptom | treatment cure
    prevent prevention | treat cure
    diagnose diagnosis | treat cure treatment
    stimulant | sedative
    awake | asleep
    sleep | wake
    eat | avoid
    pick | drop
    tip | bill
    lost lose | found find
    steal stolen | lost
    forget | remember
    agree | disagree
    ally | enemy
    hire | fire
    merge | split
    join | leave
    tie | untie
    reversible | irreversible
    odd | even
    inhale | exhale
    import | export
    lease rent | own buy
    monthly | yearly weekly daily
    host | guest
    predator | prey
    supply | demand
    inflation | deflation recession
    surplus | deficit shortage
    majority | minority
    optimist optimistic | pessimist pessimistic
    maximum | minimum
    ascending | descending
    clockwise | counterclockwise anticlockwise
    theory | practice
    with | without
"""


def _pairs(listed: str) -> tuple[tuple[str, str], ...]:
    return tuple((one, other) for one, _, other in (pair.partition("/") for pair in listed.split()))


# Each axis: the words of its one side and of its other.
AXES: tuple[tuple[frozenset[str], frozenset[str]], ...] = tuple(
    (frozenset(left.split()), frozenset(right.split()))
    for left, _, right in (row.partition("|") for row in dict.fromkeys(_AXES.strip().splitlines()))
)

# Where one word is the other with one of these before it, they are opposites, or of different degree or kind.
OPPOSING_PREFIXES = in_order(
    "un in im il ir dis non de mis anti counter contra under over pre post hyper hypo intra inter extra macro "
    "micro mono poly bi tri multi semi sub super ex out up down off on re pro trans cis endo exo ante maxi "
    "mini self vice"
)
# Pairs of prefixes that swap with each other: prepaid and postpaid.
SWAPPED_PREFIXES = _pairs(
    "pre/post hyper/hypo intra/inter macro/micro mono/poly over/under in/out in/ex im/ex up/down en/dis in/de "
    "maxi/mini endo/exo pro/anti em/dis con/di as/des for/back ab/ad sym/asym"
)
# Pairs of suffixes: careful and careless, lender and lendee.
SWAPPED_SUFFIXES = _pairs("ful/less er/ee or/ee itis/osis ate/ite ide/ate ate/ic")
# Look like opposites and are not.
SAME_IN_SPITE_OF_PREFIX = _pairs("flammable/inflammable habit/inhabit valuable/invaluable ravel/unravel press/depress")
