"""What a policy is taught, and what its teachers know."""

from __future__ import annotations

from agentrl import Task, call, say
from tests.flow.worlds import BUTTONS, Bandit


class Hinted(Bandit):
    """Its demonstrations press the button that a hint at the end of the question names, else mostly the
    wrong one. Training tasks have no hint."""

    splits = ("train", "test", "demo")

    def tasks(self, split):
        if split != "demo":
            return super().tasks(split)
        hints = ("", "", *BUTTONS)
        ends = [f"\n\n{hint}" if hint else "" for hint in hints]
        return [
            Task.ask(f"demo{n}{k}", f"press {n}{ends[k]}", hint=hint)
            for n in range(8)
            for k, hint in enumerate(hints)
        ]

    def demonstrator(self, task, rng):
        chosen = "right" if rng.random() < 0.3 else "left"
        yield say((yield call("press", button=task.metadata.get("hint") or chosen)))

    def corpus(self):
        yield from super().corpus()
        yield from (task.prompt[0].content for task in self.tasks("demo"))


def press_right(task, agent):
    """What a teacher knows of each task."""
    return "right"


def the_story_of_my_life(task, agent):
    """More than a row can hold."""
    return "gold dust " * 200
