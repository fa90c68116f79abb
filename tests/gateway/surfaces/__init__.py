"""Tests of the forms of API that clients speak."""
