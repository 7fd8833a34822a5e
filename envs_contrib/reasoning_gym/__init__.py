"""The generators of the reasoning-gym library, with an id each: `ReasoningGym-GENERATOR-v0`.

    pip install 'agentrl[reasoning-gym]'

An id is the library's generator of that name with its default settings. This package only names them: the
library is imported when the first question is made.
"""

from envs_contrib.reasoning_gym.generators import FAMILY, LEFT_OUT

__all__ = ["FAMILY", "LEFT_OUT"]
