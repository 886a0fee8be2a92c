"""Command-line tools built on the core; the core never imports them."""
