"""Tests of gateway/costs."""
