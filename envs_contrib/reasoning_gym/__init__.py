"""A dozen generators of the reasoning-gym library, with an id each.

    pip install 'agentrl[reasoning-gym]'

`ReasoningGym-GENERATOR-v0` is the library's generator of that name with its default settings; any
other one of its hundred is one line: `register("Maze-v0", ReasoningGym, generator="maze")`.

chance: the mean score of the best constant answer over the test split, among the empty one and all right
ones: the score that is possible without reading the question.
"""

from agentrl import register
from envs_contrib.reasoning_gym.env import ReasoningGym

__all__ = ["ReasoningGym"]

_CHANCES = {
    "chain_sum": 0.044,
    "basic_arithmetic": 0.055,
    "products": 0.041,
    "gcd": 0.350,
    "simple_equations": 0.053,
    "leg_counting": 0.023,
    "count_primes": 0.027,
    "base_conversion": 0.014,
    "letter_counting": 0.355,
    "number_sorting": 0.005,
    "caesar_cipher": 0.021,
    "number_format": 0.005,
}
_SPECS = {
    generator: register(f"ReasoningGym-{generator}-v0", ReasoningGym, generator=generator, chance=chance)
    for generator, chance in _CHANCES.items()
}


def __getattr__(name: str) -> object:
    """The spec of a generator, which entry points read as an attribute."""
    if name in _SPECS:
        return _SPECS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
