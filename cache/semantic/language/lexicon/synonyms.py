"""Words that ask for the same thing.

A row is a group: its first word stands for all. Rows hold base forms; inflections reach them through the lemma. What
is near but not the same (like and love, doctor and nurse) is left out on purpose.
"""

_GROUPS = """
    buy purchase
    extra additional
    remove delete erase
    stop quit cease
    start begin commence
    end finish
    repair fix mend resolve
    build construct
    choose pick select
    show display
    change alter modify amend edit
    update refresh
    create generate
    obtain acquire
    help assist aid support
    improve enhance
    reduce decrease lower lessen
    increase raise
    big large huge
    small little tiny
    strange weird odd peculiar
    quick fast rapid speedy
    easy simple effortless
    hard difficult tough
    best top greatest finest
    good great nice decent
    bad terrible awful
    cheap inexpensive affordable
    expensive pricey
    cost price
    charge fee
    smart intelligent clever
    car automobile
    movie film
    phone cellphone smartphone
    computer pc
    laptop notebook
    tv television telly
    photo picture photograph pic image
    job occupation
    kid child
    baby infant
    doctor physician doc
    lawyer attorney solicitor
    apartment flat
    vacation holiday
    city town
    country nation
    road street
    shop store
    salary wage
    money cash funds
    mistake error
    problem issue trouble
    broken busted
    method technique approach
    tip advice suggestion recommendation
    recommend suggest advise
    instruction direction
    example instance sample
    difference distinction differ differentiate distinguish
    advantage benefit pro upside
    disadvantage drawback con downside
    definition meaning
    important significant crucial vital importance significance
    dangerous risky hazardous unsafe
    allowed permitted legal lawful
    illegal unlawful
    permit allow
    prohibited forbidden banned
    correct right accurate
    wrong incorrect
    answer reply response respond
    ask inquire enquire
    speak talk
    contact reach
    join enrol enroll
    register signup
    login signin
    logout signout
    password passcode passphrase
    email mail
    refund reimburse reimbursement
    deliver delivery
    travel journey trip
    gas petrol gasoline fuel
    garbage trash rubbish
    ill sick unwell
    illness disease sickness
    symptom sign
    treatment therapy
    cure remedy
    drug medicine medication meds
    stomach tummy belly
    pain ache hurt painful
    slim thin skinny
    exercise workout
    rich wealthy
    famous popular wellknown
    old elderly
    new latest
    current present
    free complimentary
    setup install configure
    website site webpage
    app application
    program software
    find discover
    check verify confirm
    track trace
    see view
    lose lost misplace
    steal stolen
    hack hacked
    block blocked freeze frozen
    identify recognize
    learn study
    write compose
    calculate compute
    summary summarize recap overview
    employ hire
    marry wed
    die death dead
    live reside
    eat consume
    cook prepare
    use utilize
    destroy demolish
    motivate motivation
    cancel cancellation
    need require
    exchange swap trade
    withdraw withdrawal
    type kind category variety
    amount quantity
    people person folk
    inhabitant resident
    woman lady female
    man guy male
    friend pal
    father dad daddy
    mother mom mum mommy mummy
    grandmother grandma
    grandfather grandpa
    song tune
    company firm
    boss supervisor
    coworker colleague
    clothes clothing
    pants trousers
    sofa couch
    fridge refrigerator
    elevator lift
    truck lorry
    cookie biscuit
    zip postcode
    toilet restroom bathroom
    wifi wireless
    dog puppy doggy
    cat kitty
    forget forgot forgotten
    decline declined reject rejected denied refuse refused
    miss missing
    late delayed delay
    world globe earth
    happy glad
    sad unhappy
    angry mad
    afraid scared frightened
    tired exhausted
    beautiful pretty gorgeous
    funny hilarious
    main primary
    total overall
    whole entire
    locate situate
    defeat beat
    various different several
    often frequently
    usually normally typically generally
    immediately instantly
    near nearby closest nearest
    automatic auto
    limit maximum max cap
    minimum min
    average mean
    fall drop
    prevent avoid
    increase boost
    restart reboot
    expire expired expiry expiration
    happen occur
    dish meal
    effect impact affect influence consequence
    reason cause
    recover retrieve regain restore
    overcome conquer
    strengthen reinforce
    concentrate focus
    memorize remember
    handle tackle
    evaluate assess
    teen teenager adolescent
    husband hubby
    boyfriend bf
    girlfriend gf
    exam examination
    expert specialist
    coding programming
    marijuana cannabis
    plane airplane aeroplane
    bike bicycle
    motorcycle motorbike
    taxi cab
    metro subway
    luggage baggage
    link url hyperlink
    folder directory
    disappear vanish
    urinate pee
    vomit puke
    swell swollen
    pregnant pregnancy conceive
    abroad overseas
    quiet silent
    loud noisy
    anonymous anonymously
    destiny fate
    courage bravery
    jail prison
    fake counterfeit
    rabbit bunny
    freedom liberty
    romance romantic
"""

REPRESENTATIVE: dict[str, str] = {}
for _row in _GROUPS.strip().splitlines():
    _first, *_rest = _row.split()
    for _word in _rest:
        # A word of two groups keeps its first: the groups must not run together.
        REPRESENTATIVE.setdefault(_word, REPRESENTATIVE.get(_first, _first))
