"""What runs inside a server's scheduler. Its folder goes on the server's PYTHONPATH."""
