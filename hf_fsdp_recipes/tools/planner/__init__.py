"""Memory and traffic estimates for a run, from its config alone."""
