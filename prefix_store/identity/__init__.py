"""What a KV block is: the model that computed it, whose it is, and the tokens up to its end."""
