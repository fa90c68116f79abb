"""What is read from the tokens of a prompt, one file for each thing that a guard compares."""
