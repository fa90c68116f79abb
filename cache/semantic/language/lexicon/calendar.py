"""Names of times: months, weekdays, parts of the day, relative days, holidays, time zones."""

from cache.semantic.language.lexicon import words


def _names(rows: str) -> dict[str, str]:
    return {form: row.split()[0] for row in rows.strip().splitlines() for form in row.split()}


MONTHS = _names("""
    january jan
    february feb
    march mar
    april apr
    may
    june jun
    july jul
    august aug
    september sept sep
    october oct
    november nov
    december dec
""")
WEEKDAYS = _names("""
    monday mon mondays
    tuesday tues tue tuesdays
    wednesday wed weds wednesdays
    thursday thurs thur thu thursdays
    friday fri fridays
    saturday sat saturdays
    sunday sun sundays
""")
# Other words too: a time only beside a number, or after one of the words below.
AMBIGUOUS_NAMES = words("may march mar mon sun sat wed dec jan fall spring august")
BEFORE_NAMES = words("in on since until till by last next this every from during before after of early late mid")

MOMENTS = _names("""
    tomorrow tmrw tmr
    yesterday
    tonight
    morning mornings
    afternoon afternoons
    evening evenings
    noon midday
    midnight
    overnight
    weekend weekends
    weekday weekdays
    summer
    winter
    autumn
    christmas xmas
    easter
    thanksgiving
    halloween
    ramadan
    diwali
    daily everyday
    weekly
    monthly
    yearly annually annual
    hourly
    quarterly
    ago
""")

ZONES = words("utc gmt est edt cst cdt mst mdt pst pdt bst cet cest eet ist jst aest aedt hkt sgt eastern pacific zulu")
# Together with the unit or name that follows they say which one.
RELATIVE = {
    "next": "next",
    "upcoming": "next",
    "coming": "next",
    "following": "next",
    "last": "last",
    "previous": "last",
    "past": "last",
    "prior": "last",
}
