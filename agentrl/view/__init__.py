"""Runs and episodes for people: on the terminal, as a page, as a picture."""
