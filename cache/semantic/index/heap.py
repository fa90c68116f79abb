"""The C library's heap: what lists leave behind as they grow goes back to the system only when it is asked for."""

import ctypes


def give_back() -> None:
    """Hand free pages of the heap to the system; takes milliseconds, a few dozen after a gigabyte of churn.

    Does nothing where the C library is not glibc: others give pages back by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
