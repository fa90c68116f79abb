"""What holds for the tests of quantised weights."""

from hypothesis import settings

# The first example of a run pays for what torch loads late.
settings.register_profile("without deadline", settings.default, deadline=None)
settings.load_profile("without deadline")
