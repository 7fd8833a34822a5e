"""The probes of a check: each plays or reads an environment, and returns findings and figures."""
