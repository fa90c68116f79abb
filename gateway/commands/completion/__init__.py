"""`keepgate completion SHELL`: a script that completes commands, options and their values in bash, zsh or fish.

help_text.py reads commands and options out of what each command prints for --help, which is all that they have in
common: some are of programs that the gateway does not import. bash.py, zsh.py and fish.py write the scripts,
command.py is the command. Read help_text.py first. Uses no other subpackage.
"""
