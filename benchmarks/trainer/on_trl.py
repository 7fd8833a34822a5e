"""A side of the benchmark that runs under another interpreter, with TRL: its GRPO trainer, step by step.

Its last argument is JSON: model, folder, threads, prompts, siblings, prompt, new, padded; and rows, a file of
token ids and masks that are trained in place of sampling; or boxes, with turn and most (tokens of a turn and
of an episode) and lr, for a task of tool calls. It prints an object when it is ready. For each line that it
reads it takes a step, and prints its seconds; for `save FOLDER` it saves the model.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict
from zlib import crc32

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.trainer import boxes

_Json = dict[str, object]
_STEPS = 10_000


class _Settings(TypedDict):
    """Those that one of the loads has."""

    prompts: int
    prompt: int
    new: int
    rows: NotRequired[str]
    boxes: NotRequired[bool]
    tasks: int
    most: int
    turn: int
    lr: float
    seed: NotRequired[int]


class _Asked(TrainerCallback):
    """Waits for a line before each step, and answers after it."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: PreTrainedModel | PreTrainedTokenizerBase,
    ) -> None:
        """Wait for a line; without one, end."""
        del args, state, control
        while (line := sys.stdin.readline()).startswith("save "):
            folder = line.removeprefix("save ").strip()
            parts["model"].save_pretrained(folder)
            parts["processing_class"].save_pretrained(folder)
            print(json.dumps({"saved": folder}), flush=True)
        if not line:
            sys.exit(0)
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Answer."""
        del args, control
        seconds = time.perf_counter() - self._began
        print(json.dumps({"seconds": seconds, "step": state.global_step}), flush=True)


def _rows_of(path: Path) -> Callable[[object, object], _Json]:
    """What TRL asks for in place of its own sampling."""
    rows = json.loads(path.read_text())

    def rollout(prompts: object, trainer: object) -> _Json:
        del prompts, trainer
        return {
            "prompt_ids": [row["ids"][: row["prompt"]] for row in rows],
            "completion_ids": [row["ids"][row["prompt"] :] for row in rows],
            "logprobs": [[0.0] * (len(row["ids"]) - row["prompt"]) for row in rows],
            "env_mask": [row["mask"][row["prompt"] :] for row in rows],
        }

    return rollout


def _drawn(completions: list[str], **_: object) -> list[float | None]:
    return [float(crc32(text.encode()) % 5) for text in completions]


class _Boxes:
    """TRL makes one for each episode, and offers its methods as tools."""

    def reset(self, seed: int, **_: object) -> None:
        """An episode begins."""
        self._seed = seed

    def open_box(self, box: str) -> str:
        """Open a box.

        Args:
            box: the box
        """
        return boxes.content(self._seed, box)


def _right(completions: list[list[dict[str, str]]], seed: list[int], **_: object) -> list[float | None]:
    said = (completion[-1].get("content") or "" for completion in completions)
    return [boxes.is_right(number, text) for number, text in zip(seed, said, strict=True)]


def main() -> None:
    """Train until nobody asks for a step."""
    settings = json.loads(sys.argv[-1])
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left", trust_remote_code=False)
    config = partial(
        GRPOConfig,
        output_dir=settings["folder"],
        per_device_train_batch_size=settings["padded"],
        gradient_accumulation_steps=settings["prompts"] * settings["siblings"] // settings["padded"],
        num_generations=settings["siblings"],
        beta=0.0,
        lr_scheduler_type="constant",
        max_steps=_STEPS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=_STEPS,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = partial(GRPOTrainer, model=model, processing_class=tokenizer, callbacks=[_Asked()])
    if "boxes" in settings:
        made = _of_boxes(settings, config, trainer)
    else:
        tokenizer.pad_token, tokenizer.eos_token = "t0", "t1"
        made = _of_one_turn(settings, config, trainer)
    print(json.dumps({"step": 0}), flush=True)
    made.train()


def _of_one_turn(
    settings: _Settings, config: Callable[..., GRPOConfig], trainer: Callable[..., GRPOTrainer]
) -> GRPOTrainer:
    words = [
        " ".join(f"t{2 + (7 * number + place) % 1000}" for place in range(settings["prompt"]))
        for number in range(settings["prompts"])
    ]
    return trainer(
        reward_funcs=_drawn,
        args=config(
            max_completion_length=settings["new"],
            generation_kwargs={"min_new_tokens": settings["new"]},
            learning_rate=1e-5,
        ),
        train_dataset=Dataset.from_dict({"prompt": words * (_STEPS // len(words))}),
        rollout_func=_rows_of(Path(settings["rows"])) if "rows" in settings else None,
    )


def _of_boxes(
    settings: _Settings, config: Callable[..., GRPOConfig], trainer: Callable[..., GRPOTrainer]
) -> GRPOTrainer:
    rows = [
        {"prompt": [{"role": "user", "content": boxes.question(seed)}], "seed": seed}
        for seed in boxes.TRAINED[: settings["tasks"]]
    ]
    return trainer(
        reward_funcs=_right,
        args=config(
            # That of all turns and results; a turn is as long as on the other side.
            max_completion_length=settings["most"],
            generation_kwargs={"max_new_tokens": settings["turn"]},
            max_tool_calling_iterations=5,
            chat_template_kwargs=boxes.TEMPLATE,
            learning_rate=settings["lr"],
            seed=settings.get("seed", 42),
        ),
        train_dataset=Dataset.from_list(rows),
        environment_factory=_Boxes,
    )


if __name__ == "__main__":
    main()
