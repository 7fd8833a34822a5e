"""Games of TextArena for one player, without network and language model: `TextArena-GAME-v0`.

pip install 'agentrl[textarena]'
"""

from envs_contrib.textarena.games import FAMILY

__all__ = ["FAMILY"]
