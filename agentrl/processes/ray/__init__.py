"""Ray: the only modules of the package that import it."""
