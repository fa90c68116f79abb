"""Ways to choose the bits of weights that look at what the weights are multiplied with."""
