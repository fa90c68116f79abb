"""Numbers in words, and units of measure by one name each."""

from cache.semantic.language.lexicon import in_order, words

NUMBER_WORDS: dict[str, int] = {
    word: value
    for value, word in enumerate(
        in_order(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen"
        )
    )
} | {
    word: 10 * value
    for value, word in enumerate(in_order("twenty thirty forty fifty sixty seventy eighty ninety"), start=2)
}
NUMBER_WORDS["dozen"] = 12

MULTIPLIERS: dict[str, int] = {
    "hundred": 100,
    "thousand": 1_000,
    "million": 1_000_000,
    "billion": 1_000_000_000,
    "trillion": 1_000_000_000_000,
}
SUFFIXES: dict[str, int] = {"k": 1_000, "m": 1_000_000, "mn": 1_000_000, "bn": 1_000_000_000, "b": 1_000_000_000}

# Said of an amount without a figure; each stands for itself.
AMOUNT_WORDS = words("half quarter triple thrice dozens hundreds thousands millions billions")

ORDINALS: dict[str, str] = {
    word: f"{value}th"
    for value, word in enumerate(
        in_order("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"), start=1
    )
}

_UNITS = """
    dollar dollars usd bucks buck $ us$
    euro euros eur €
    pound pounds gbp quid £
    yen jpy ¥
    rupee rupees inr ₹ rs
    franc francs chf
    yuan rmb cny
    peso pesos mxn
    won krw ₩
    ruble rubles rub ₽
    bitcoin bitcoins btc ₿
    ether ethereum eth
    cad
    aud
    nzd
    percent % percentage pct
    second seconds sec secs
    minute minutes min mins
    hour hours hr hrs
    day days
    night nights
    week weeks wk wks
    fortnight fortnights
    month months
    year years yr yrs
    decade decades
    century centuries
    millisecond milliseconds ms
    millimeter millimeters millimetre millimetres mm
    centimeter centimeters centimetre centimetres cm
    meter meters metre metres
    kilometer kilometers kilometre kilometres km kms
    inch inches
    foot feet ft
    yard yards yd
    mile miles mi
    microgram micrograms mcg µg μg ug
    milligram milligrams mg mgs
    gram grams gramme grammes
    kilogram kilograms kilo kilos kg kgs
    ounce ounces oz
    lb lbs
    tonne tonnes ton tons
    stone stones
    milliliter milliliters millilitre millilitres ml
    liter liters litre litres
    gallon gallons gal
    pint pints
    quart quarts
    cup cups
    teaspoon teaspoons tsp
    tablespoon tablespoons tbsp
    celsius °c centigrade
    fahrenheit °f
    kelvin
    degree degrees °
    calorie calories kcal cal cals
    joule joules
    kilobyte kilobytes kb
    megabyte megabytes mb
    gigabyte gigabytes gb gig gigs
    terabyte terabytes tb
    megabit megabits mbps
    watt watts
    kilowatt kilowatts kw
    volt volts
    mph
    kph kmh
    acre acres
    hectare hectares
    tablet tablets
    pill pills
    drop drops
    iu
    mmol
    bpm
    byte bytes
    bit bits
    hertz hz
    mhz
    ghz
"""
UNITS: dict[str, str] = {form: line.split()[0] for line in _UNITS.strip().splitlines() for form in line.split()}
# Too common as other words to be a unit without a figure before them.
AMBIGUOUS_UNITS = words(
    "second seconds sec min cup cups stone stones foot feet rs won drop drops bit bits quarter gal cal mi ms ton tons "
    "yard yards tablet tablets night nights lb"
)
# These count only directly after a figure: "5 m", "3 g".
SHORT_UNITS: dict[str, str] = {
    "m": "meter",
    "g": "gram",
    "l": "liter",
    "h": "hour",
    "s": "second",
    "w": "watt",
    "v": "volt",
    "d": "day",
    "y": "year",
    "c": "celsius",
    "f": "fahrenheit",
    "in": "inch",
}
