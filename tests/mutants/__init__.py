"""Bugs that are planted one at a time, each of which a named test must detect."""
