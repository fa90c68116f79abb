"""Tests of the index of entries."""
