"""What runs in the interpreter of verifiers; nothing else imports it."""
