"""What launching meets of SGLang, as a small real program: its arguments, its processes, its health."""
