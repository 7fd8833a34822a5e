"""Ranks as processes: their start, their rendezvous, and the messages between them and the driver."""
