"""Ranks as processes: who starts them, where they meet, what goes between them and the driver."""
