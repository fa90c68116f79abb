"""What holds for every test of the repository."""

pytest_plugins = ["tests.no_skips"]
