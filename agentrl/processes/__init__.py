"""The machines of a run: where its ranks and servers are placed, and Ray, which starts them there.

Only the package `ray` in here imports Ray, and only when a run uses it.
"""
