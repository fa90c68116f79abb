"""`keepgate replay`: traces of real traffic through the eviction code of the store."""
