"""The functions by path, as a run names them."""

from envs_contrib.slime import generate_of

HERE = "tests.envs_contrib.slime"

search = generate_of(f"{HERE}.search.generate", f"{HERE}.search.reward_func")
code = generate_of(f"{HERE}.code.generate", f"{HERE}.code.reward_func", args={"reward_key": "score"})
