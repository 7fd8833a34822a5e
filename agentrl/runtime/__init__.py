"""Time in one process: stages and deadlines, what a run does at this moment, files, interrupts, loops."""
