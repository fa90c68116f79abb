"""What make calls: installing, and pinning what is installed."""
