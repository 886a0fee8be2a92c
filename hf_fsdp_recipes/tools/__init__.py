"""Command-line tools. Apart from the command line itself (`cli.py`), the library does not import them."""
