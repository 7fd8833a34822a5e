"""Short codes of text: run lengths, Roman numerals, words."""

from __future__ import annotations

from itertools import groupby

ROMAN = (
    *((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC")),
    *((50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")),
)


def encode(text: str) -> str:
    """Run lengths: aaab is 3a1b."""
    return "".join(f"{len(list(run))}{letter}" for letter, run in groupby(text))


def decode(code: str) -> str:
    """The text of run lengths, of any number of digits.

    Raises:
        ValueError: a letter has no number.
    """
    text, digits = "", ""
    for character in code:
        if character.isdigit():
            digits += character
            continue
        if not digits:
            raise ValueError("a letter without a number")
        text += character * int(digits)
        digits = ""
    return text


def roman(number: int) -> str:
    """A number from 1 to 3999 in Roman numerals.

    Raises:
        ValueError: the number is out of range.
    """
    if not 1 <= number <= 3999:
        raise ValueError("only 1 to 3999")
    numeral = ""
    for value, letters in ROMAN:
        count, number = divmod(number, value)
        numeral += letters * count
    return numeral


def counts(text: str) -> list[list[str]]:
    """The words of a text with how often each occurs, the most frequent first; equal ones by name."""
    words = [word.strip(".,;:!?").lower() for word in text.split()]
    table: dict[str, int] = {}
    for word in filter(None, words):
        table[word] = table.get(word, 0) + 1
    return [[word, str(table[word])] for word in sorted(table, key=lambda word: (-table[word], word))]
