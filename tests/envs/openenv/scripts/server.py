"""A server of OpenEnv: a game of guessing, or tools of MCP, with room for two sessions."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    "Guess a number."

    guess: int


class Hint(Observation):
    hint: str


class World(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **named):
        self.secret = (seed or 0) % 10
        return Hint(hint="guess", done=False)

    def step(self, action, timeout_s=None, **named):
        if action.guess == 99:
            raise RuntimeError("broken")
        right = action.guess == self.secret
        hint = "right" if right else "higher" if self.secret > action.guess else "lower"
        return Hint(hint=hint, done=right, reward=float(right))

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("tools")
        self.sum = 0

        @mcp.tool()
        def add(a: int, b: int) -> int:
            "Add two numbers."
            self.sum = a + b
            return self.sum

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **named):
        self.secret = (seed or 0) % 10
        return Observation(metadata={"question": f"Make {self.secret}."})

    def step(self, action, timeout_s=None, **named):
        return self._judged(super().step(action, timeout_s=timeout_s, **named))

    async def step_async(self, action, timeout_s=None, **named):
        return self._judged(await super().step_async(action, timeout_s=timeout_s, **named))

    def _judged(self, observation):
        if isinstance(observation, CallToolObservation):
            observation.done = observation.error is None and self.sum == self.secret
            observation.reward = float(observation.done)
        return observation

    def _step_impl(self, action, timeout_s=None, **named):
        return Observation()

    @property
    def state(self):
        return State()


kinds = {"guess": (World, Guess, Hint), "tools": (Tools, CallToolAction, CallToolObservation)}
app = create_app(*kinds[sys.argv[1]], max_concurrent_envs=int(sys.argv[3]))
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
