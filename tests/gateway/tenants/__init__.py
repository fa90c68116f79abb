"""Virtual keys, their limits, and who a caller is, on a real Valkey."""
