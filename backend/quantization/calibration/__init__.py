"""What a model is calibrated on: windows of text, and what its linear layers see of them."""
