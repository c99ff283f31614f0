"""What every command is made of: its parser, exit codes, errors of one line."""
