"""From configuration to objects: the only place where names become code."""
