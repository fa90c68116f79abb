"""How far the clocks of other machines are from this one's."""

import time
from email.utils import parsedate_to_datetime

from gateway.commands.doctor.finding import Finding, ok, warning

MAX_SKEW = 1.0
"""Seconds. Limits, budgets and the ages of answers are told apart by less."""
_ADVICE = "let both machines keep time, with chrony or systemd-timesyncd; `timedatectl` shows whether this one does"


def of_redis(seconds: float, microseconds: float, began: float, ended: float) -> Finding:
    """Of the reply to TIME; `began` and `ended` are when it was asked and had answered, in seconds since 1970."""
    theirs = seconds + microseconds / 1e6
    return _finding("clock", "Redis", theirs - ended, theirs - began)


def of_answer(upstream: str, date: str, age: str, began: float, ended: float) -> Finding | None:
    """Of the headers Date and Age of an answer (RFC 9110, section 6.6.1); None where there is no Date."""
    try:
        theirs = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    if age.isdecimal():  # a cache on the way has kept the answer for so long
        theirs += int(age)
    # The header has whole seconds: it was cut off somewhere in the second that it names.
    return _finding("clock", upstream, theirs - ended, theirs + 1.0 - began)


def now() -> float:
    """Seconds since 1970 by the clock of this machine."""
    return time.time()


def _finding(check: str, source: str, least: float, most: float) -> Finding:
    """Their clock is between `least` and `most` seconds ahead of this one."""
    if most >= -MAX_SKEW and least <= MAX_SKEW:
        return ok(check, f"{source}: within {MAX_SKEW:g} s of this machine's")
    skew = least if least > 0 else most
    side = "ahead of" if skew > 0 else "behind"
    return warning(check, f"{source}: its clock is {abs(skew):,.1f} s {side} this machine's", _ADVICE)
