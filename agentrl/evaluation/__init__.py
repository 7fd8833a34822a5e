"""Eval-only runs and the evaluations inside a training run: one loop, one report."""
