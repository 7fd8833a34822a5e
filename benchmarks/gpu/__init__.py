"""`python -m benchmarks gpu`: trainers, weights, generator and whole runs on the GPUs of this machine.

Each part is a job in a process of its own (`job`). The command (`everything`) gives them their turns, passes
their rows on as they come, and compares them with the best ones of this card (`baselines`).
"""
