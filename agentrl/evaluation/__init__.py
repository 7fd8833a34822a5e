"""Eval-only runs, and the evaluations of a training run: both use the same loop and report."""
