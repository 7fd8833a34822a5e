"""Requests with retries, the guarded client, servers."""
