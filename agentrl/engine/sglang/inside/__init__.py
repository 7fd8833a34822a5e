"""The module that runs inside a server's scheduler. This directory goes on the server's PYTHONPATH."""
