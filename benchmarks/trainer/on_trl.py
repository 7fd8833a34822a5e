"""A side of the benchmark that runs under another interpreter, with TRL: its GRPO trainer, step by step.

Its last argument is JSON: model, threads, prompts, siblings, prompt, new, padded; and rows, a file of token
ids and masks that are trained in place of sampling. It prints an object when it is ready, and for each line
that it reads the seconds and the tokens of one step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

_Json = dict[str, object]
_STEPS = 10_000


class _Asked(TrainerCallback):
    """Waits for a line before each step, and answers after it."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Wait for a line; without one, end."""
        if not sys.stdin.readline():
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


def main() -> None:
    """Train until nobody asks for a step."""
    settings = json.loads(sys.argv[-1])
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left", trust_remote_code=False)
    tokenizer.pad_token, tokenizer.eos_token = "t0", "t1"
    samples = settings["prompts"] * settings["siblings"]
    words = [
        " ".join(f"t{2 + (7 * number + place) % 1000}" for place in range(settings["prompt"]))
        for number in range(settings["prompts"])
    ]
    config = GRPOConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=settings["padded"],
        gradient_accumulation_steps=samples // settings["padded"],
        num_generations=settings["siblings"],
        max_completion_length=settings["new"],
        generation_kwargs={"min_new_tokens": settings["new"]},
        beta=0.0,
        learning_rate=1e-5,
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
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_drawn,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": words * (_STEPS // len(words))}),
        processing_class=tokenizer,
        callbacks=[_Asked()],
        rollout_func=_rows_of(Path(settings["rows"])) if "rows" in settings else None,
    )
    print(json.dumps({"step": 0}), flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
