"""Presentation of runs and episodes: on the terminal, as an HTML page, as an image."""
