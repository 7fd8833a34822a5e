"""The torch trainer beside what else trains: TRL, padded batches, and a bare loop."""
