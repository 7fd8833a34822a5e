"""Processes that a run starts, here or on other machines: children, guards, their places, and Ray.

Only the package `ray` in here imports Ray, and only when a run uses it.
"""
