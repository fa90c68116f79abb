"""Irregular forms by their base form, and words that only look inflected."""

from cache.semantic.language.lexicon import words

_FORMS = """
    be is are was were been being am
    have has had having
    do does did done doing
    buy bought
    sell sold
    send sent
    pay paid
    lose lost losing loss
    find found
    get got gotten getting
    give gave given
    take took taken taking
    make made making
    come came
    go went gone going goes
    see saw seen
    say said
    tell told
    think thought
    know knew known
    write wrote written writing
    read
    speak spoke spoken
    break broke
    steal stole stolen
    choose chose chosen
    freeze froze frozen
    begin began begun
    drink drank drunk
    eat ate eaten
    drive drove driven
    ride rode ridden
    rise rose risen
    fall fell fallen
    grow grew grown
    fly flew flown flies
    draw drew drawn
    throw threw thrown
    wear wore worn
    tear tore torn
    win won winning
    run ran
    swim swam swum
    sing sang sung
    ring rang rung
    teach taught
    catch caught
    bring brought
    fight fought
    feel felt
    keep kept
    sleep slept
    leave left
    meet met
    mean meant
    spend spent
    lend lent
    build built
    hold held
    hear heard
    stand stood
    understand understood
    forget forgot forgotten
    hide hid hidden
    bite bit bitten
    beat beaten
    become became
    die died dying dies
    lie lied lying
    use used using uses
    add added adding adds
    need needed needing needs
    child children
    man men
    woman women
    person persons people
    tooth teeth
    foot feet
    mouse mice
    life lives
    wife wives
    knife knives
    half halves
    center centre centers centres
    theater theatre theaters theatres
    fiber fibre
    caliber calibre
    catalog catalogue
    dialog dialogue
    program programme programmes
    check cheque cheques
    gray grey
    tire tyre tyres
    aluminum aluminium
    mom mum mums
    pajamas pyjamas
    jewelry jewellery
    license licence
    defense defence
    offense offence
    practice practise
    mold mould
    skeptic sceptic
    airplane aeroplane plane planes
    esophagus oesophagus
    anemia anaemia
    pediatric paediatric
    diarrhea diarrhoea
    estrogen oestrogen
    hemoglobin haemoglobin
    hemorrhage haemorrhage
    edema oedema
    leukemia leukaemia
    fetus foetus
    delivery deliveries
    withdraw withdrew withdrawn withdrawal withdrawals
    arrive arrival
    verify verification
    identify identification
    apply application-form
    refuse refusal
    approve approval
    cancel cancellation cancelation
    pay payment payments
    expire expiry expiration expires expired
    explain explanation
    describe description
    receive reception
    analysis analyses
    crisis crises
    criterion criteria
    datum data
    bus buses
    well
    worse
    capital capitol
"""
IRREGULAR: dict[str, str] = {form: row.split()[0] for row in _FORMS.strip().splitlines() for form in row.split()}

UNCHANGED = words(
    "news species series always physics mathematics maths politics economics athletics gymnastics ethics statistics "
    "bus gas lens plus basis axis oasis bias atlas canvas chaos cosmos virus campus status bonus census focus genius "
    "savings goods customs arms glasses earnings windows diabetes rabies herpes measles mumps rickets texas paris "
    "kansas arkansas athens brussels james jesus mars venus christmas netherlands philippines maldives wales laos "
    "cyprus honduras barbados bahamas stare paste quite heroine breathe clothe morale locale humane urbane tense "
    "corpse please lapse sparse browse tease dense caste forte route lease prime grime slime scare spare scrape "
    "stripe bathe loathe envelope plate slate state shine spine twine stage gripe slope globe states emirates ios "
    "aws gps sms hiv united naked sacred wicked hundred kindred biped embed during morning evening nothing something "
    "everything anything ceiling being sibling wedding pudding boeing beijing spring string sterling this thus us is "
    "as his was has does yes its perhaps besides towards afterwards only early family apply reply supply july italy "
    "daily weekly monthly yearly hourly quarterly assembly monopoly anomaly belly jelly bully rally ally lately "
    "shortly fly ugly holy lily lovely friendly lonely likely elderly ugly hardly barely butterfly millions billions "
    "tennis pancreas penis pelvis arthritis hepatitis bronchitis dermatitis mercedes adidas asus lotus linux feed "
    "seed weed breed bleed speed greed exceed proceed succeed indeed need deed reed steed creed station nation "
    "ration motion lotion potion action option mention portion section fiction friction fraction auction caution "
    "function junction question condition position addition edition tradition nutrition ambition petition "
    "competition exhibition relation vacation location information organization"
)
