"""Attacks on a running gateway; docs/threat-model.md names the test of each threat."""
