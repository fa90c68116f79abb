"""How all commands show sums of money."""

_LEAST = 0.0001


def dollars(amount: float, unpriced: int = 0) -> str:
    """US dollars: to the cent from one on, and below to the hundredth of a cent. A cost that is not known is never 0:
    without any other, that of `unpriced` requests is "-".
    """
    if not amount and unpriced:
        return "-"
    if 0 < amount < _LEAST:
        return f"<${_LEAST}"
    return f"${amount:,.2f}" if amount >= 1 or not amount else f"${amount:.4f}"


def unpriced_note(unpriced: int) -> str:
    """What is said below sums that lack the cost or saving of so many requests; they are at least one."""
    return f"Requests without a known price, which are in no sum: {unpriced:,}"
