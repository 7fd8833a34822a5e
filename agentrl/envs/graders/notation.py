"""What math-verify misreads in an expression, or leaves out of it: forms of numbers, bases, units, words.

Of `4 cm` it compares the 4, of `1101_2` the 1101, of a word the product of its letters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

_SEPARATOR = r"(?:,\\!|\{,\}|\\[,!;: ]|[~\u00a0\u2009\u202f])"
_GROUPED = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)", re.ASCII)
_NEGATIVE_POWER = re.compile(r"\^\s?[-\u2212]\s?(\d{1,9})", re.ASCII)
_E_NOTATION = re.compile(r"[-+]?(?:\d{1,99}\.?\d{0,99}|\.\d{1,99})e[-+]?\d{1,3}", re.ASCII)
_SURE_E_NOTATION = re.compile(r"[-+]?(?:1e|.{0,99}\.|.{0,99}e(?:-0|\+)\d)", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(?:\d{1,99}\.?\d{0,99}|\.\d{1,99})(?:E[-+]?\d{1,3})?", re.ASCII | re.IGNORECASE)

_STYLE = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)\b")
_BASE = re.compile(r"\d\)?[\s}]{0,3}_[\s({]{0,3}(\d{1,2}|[a-z]{3,9})", re.ASCII | re.IGNORECASE)
_NUMERALS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
_WORDS = re.compile(r"[a-z ]{5,}", re.ASCII)

_UNITS: Mapping[str, str] = MappingProxyType(
    {
        alias: name
        for name, aliases in {
            "mm": "millimeter millimetre",
            "cm": "centimeter centimetre",
            "dm": "decimeter decimetre",
            "m": "meter metre",
            "km": "kilometer kilometre",
            "inch": "in inche",
            "foot": "ft feet",
            "yard": "yd",
            "mile": "mi",
            "mg": "milligram",
            "g": "gram",
            "kg": "kilogram",
            "ton": "tonne",
            "pound": "lb £",
            "ounce": "oz",
            "second": "s sec",
            "minute": "min",
            "hour": "h hr",
            "day": "",
            "week": "",
            "month": "",
            "year": "yr",
            "gallon": "gal",
            "dollar": "$ usd",
            "cent": "¢",
            "euro": "€",
            "degree": "° deg",
            "radian": "rad",
            "celsius": "c",
            "fahrenheit": "f",
            "am": "",
            "pm": "",
            "east": "",
            "west": "",
            "north": "",
            "south": "",
            "increase": "",
            "decrease": "",
            "gain": "profit",
            "loss": "",
        }.items()
        for alias in (name, *aliases.split())
    }
)
_COMPOUND = {"mph": "mile / hour", "kmh": "km / hour", "kmph": "km / hour", "ml": "cm ^3", "cc": "cm ^3"}
_COMPOUND |= dict.fromkeys(("l", "liter", "litre", "liters", "litres"), "dm ^3")
_FRACTION = re.compile(
    r"\\[dt]?frac\s?\{[\s{]{0,3}([^{}\d]{1,40})\}{1,2}\s?\{[\s{]{0,3}([^{}\d]{1,40})\}{1,2}"
)
_TAIL = re.compile(r"(?<=[\d°)])((?:[a-z€£¢°²³/.*\s]|\^\s?-?\d)+)$")
_PART = re.compile(r"[a-z]+|[€£¢$°/]|\^\s?-?\d|[²³]")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "²": 2, "³": 3}


def readable(expression: str, other: str) -> str:
    r"""An expression in a form that math-verify reads as it is meant.

    `12\,000` becomes `12000`, `10^-12` becomes `10^{-12}`, and `1e-05` a number, not e - 5. `2e-5` may be
    meant either way: where the `other` expression is a decimal, it is a number.
    """
    text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), expression)
    text = _NEGATIVE_POWER.sub(r"^{-\1}", text)
    is_number = _E_NOTATION.fullmatch(text) and (_SURE_E_NOTATION.match(text) or _DECIMAL.fullmatch(other))
    return text.upper() if is_number else text


def are_distinct(first: str, second: str) -> bool:
    """Whether two expressions differ in what math-verify leaves out: both name a base, or a unit, and not the
    same one; or both are words. An expression without a base or a unit may be the other one's number."""
    bases = _bases(first), _bases(second)
    unit, other = _unit(first), _unit(second)
    if all(bases) and bases[0] != bases[1]:
        return True
    if unit and other and unit != other and not _are_degrees(unit, other):
        return True
    words = [text.lower() for text in (first, second)]
    return all(map(_WORDS.fullmatch, words)) and words[0].split() != words[1].split()


def _bases(expression: str) -> list[str]:
    """The bases of the numerals in an expression, `2` in `1101_2` and in `1101_{\\text{two}}`, sorted."""
    found = (base.lower() for base in _BASE.findall(_STYLE.sub(" ", expression).replace("{", " ")))
    return sorted(str(_NUMERALS.index(base)) if base in _NUMERALS else base for base in found)


def _unit(expression: str) -> Mapping[str, int] | None:
    """The powers of the units at the end of an expression; None where some word there is no known unit."""
    text = _FRACTION.sub(r" \1 / \2 ", _STYLE.sub(" ", expression))
    text = re.sub(r"\^?\s?\{?\\(?:circ|degree)\b\}?", "°", text)
    currency = "$" if text.lstrip("{ ").startswith("\\$") else ""
    text = re.sub(r"\\[,;:!% $]|[{}~$]", " ", text)
    text = re.sub(r"\\[a-zA-Z]+", "0", text).lower().strip(" .")
    tail = _TAIL.search(re.sub(r"\^\s+", "^", text))
    words = (_COMPOUND.get(word, word) for word in _PART.findall(tail[1])) if tail else ()
    return _powers(_PART.findall(f"{currency} {' '.join(words)}"))


def _powers(parts: list[str]) -> Mapping[str, int] | None:
    powers: Counter[str] = Counter()
    sign, ahead, last = 1, 1, ""
    for part in parts:
        if part in ("/", "per"):
            sign = -1
        elif part in ("²", "³") or part.startswith("^"):
            power = _POWERS.get(part) or int(part[1:])
            powers[last] += sign * (power - 1) if last else 0
        elif part in _POWERS:
            ahead = _POWERS[part]
        else:
            known = _UNITS.get(part) or _UNITS.get(part.removesuffix("s"))
            if known is None:
                return None
            last, powers[known] = known, powers[known] + sign * ahead
            ahead = 1
    if powers.keys() & {"celsius", "fahrenheit"}:
        del powers["degree"]
    return powers


def _are_degrees(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """Whether one is a temperature, and the other degrees of some kind."""
    kinds = {*first, *second}
    return "degree" in kinds and kinds < {"degree", "celsius", "fahrenheit"}
