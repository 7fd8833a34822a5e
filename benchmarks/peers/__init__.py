"""Episodes of other packages on the same engine: verifiers."""
