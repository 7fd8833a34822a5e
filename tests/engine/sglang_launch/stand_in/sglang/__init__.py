"""A stand-in for SGLang as a small real program: its arguments, its processes, its health check."""
