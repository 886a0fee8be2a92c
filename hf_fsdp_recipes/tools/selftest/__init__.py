"""Short measurements and checks on this machine's own devices, in one report."""
