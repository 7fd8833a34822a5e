"""A ledger: accounts with balances in cents, and a line for every movement."""

from __future__ import annotations


class Ledger:
    """Balances by account. Nothing may be overdrawn."""

    def __init__(self) -> None:
        self.balances: dict[str, int] = {}
        self.lines: list[str] = []

    def deposit(self, account: str, cents: int) -> None:
        """Add money to an account, which is opened where it is new.

        Raises:
            ValueError: the amount is not positive.
        """
        if cents <= 0:
            raise ValueError("the amount must be positive")
        self.balances[account] = self.balances.get(account, 0) + cents
        self.lines.append(f"{account} +{money(cents)}")

    def transfer(self, source: str, target: str, cents: int) -> None:
        """Move money between accounts.

        Raises:
            ValueError: the amount is not positive, or larger than the balance.
        """
        if cents <= 0 or cents > self.balances.get(source, 0):
            raise ValueError("the amount does not fit the balance")
        self.balances[source] -= cents
        self.balances[target] = self.balances.get(target, 0) + cents
        self.lines.append(f"{source} -> {target} {money(cents)}")


def money(cents: int) -> str:
    """An amount with its cents, as in 12.05."""
    return f"{cents // 100}.{cents % 100:02d}"


def play(movements: list[list[str]]) -> list[str]:
    """The lines of a new ledger after movements: [account, cents] or [source, target, cents].

    Movements that are refused are left out, and counted in the last line.
    """
    ledger, refused = Ledger(), 0
    for movement in movements:
        *accounts, cents = movement
        try:
            if len(accounts) == 1:
                ledger.deposit(accounts[0], int(cents))
            else:
                ledger.transfer(accounts[0], accounts[1], int(cents))
        except ValueError:
            refused += 1
    return [*ledger.lines, f"refused: {refused}"]


def richest(movements: list[list[str]], number: int) -> list[str]:
    """The accounts with the largest balances, the largest first; equal ones by name."""
    ledger = Ledger()
    for *accounts, cents in movements:
        ledger.deposit(accounts[-1], int(cents))
    ranked = sorted(ledger.balances, key=lambda account: (-ledger.balances[account], account))
    return ranked[:number]
