"""`python -m agentrl.cli`."""

from agentrl.cli import main

if __name__ == "__main__":
    main()
