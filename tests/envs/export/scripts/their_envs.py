"""Environments as packages for verifiers 0.3 have them, one of each kind."""

import verifiers as vf
from datasets import Dataset


def right(completion, answer):
    return float(completion[-1].content == answer)


def brief(state):
    return 1.0 / len(state["trajectory"])


def ranked(completions):
    return [0.0 for _ in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def lose() -> str:
    """Lose the world."""
    raise KeyError("it is gone")


def pay(amount: int, purse: dict) -> str:
    """Pay."""
    purse["left"] -= amount
    return f"{purse['left']} are left."


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == state["answer"]:
            state["final_env_response"] = []
            return []
        return [vf.UserMessage(content="higher" if int(said) < int(state["answer"]) else "lower")]


class Purse(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(pay, args_to_skip=["purse"])

    async def setup_state(self, state):
        state["purse"] = {"left": 10}
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "purse": state["purse"]}


def spent(state):
    return float(state["purse"]["left"] == 3)


def rows(*pairs):
    return Dataset.from_list([{"question": question, "answer": answer} for question, answer in pairs])


def load_environment(kind, num_turns=4):
    numbers = rows(*((f"Guess {n}.", str(n)) for n in (7, 12, 30)))
    sums = rows(("2 + 3?", "5"), ("4 + 4?", "8"), ("1 + 1?", "2"))
    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.25])
    if kind == "guess":
        return Guess(dataset=numbers, rubric=rubric, max_turns=num_turns, system_prompt="Numbers only.")
    if kind == "tools":
        return vf.ToolEnv(dataset=sums, eval_dataset=sums, tools=[add], rubric=rubric)
    if kind == "stateful":
        return Purse(dataset=sums, rubric=vf.Rubric(funcs=[spent]))
    if kind == "lost":
        return vf.ToolEnv(dataset=sums, tools=[lose], stop_errors=[KeyError], rubric=rubric)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=sums, rubric=vf.Rubric(funcs=[right]))
    return vf.SingleTurnEnv(dataset=sums, rubric=vf.Rubric(funcs=[ranked]))
