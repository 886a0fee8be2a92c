"""The command-line tools. In the rest of the package, only `cli.py` imports them."""
