"""The task of boxes as an environment of ours, and a small model that knows its form, and is often wrong."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import agentrl
from agentrl import Limits, Script, Task, ToolEnv, call, say, tool
from agentrl.assembly.keywords import TrainSettings
from agentrl.types import JSON, Observation
from benchmarks.trainer import boxes

MOST_TOKENS = 1280
"""Of an episode."""
TURN_TOKENS = 24
NUM_TASKS = 4096
"""That are trained."""
_VOCABULARY = 760
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_DEMONSTRATED = "Open zero.\nYou may call functions. The function's result is <tool_response> the a of and"


class Boxes(ToolEnv):
    """Open boxes until one names a value, and say it."""

    limits = Limits(max_turns=6, max_tokens=MOST_TOKENS)

    @tool(inline=True)
    def open_box(self, box: str) -> str:
        """Open a box.

        Args:
            box: the box
        """
        return boxes.content(self._seed, box)

    tools = (open_box,)

    def tasks(self, split: str) -> Sequence[Task]:
        """A task for each seed."""
        seeds = boxes.HELD_OUT if split == "test" else boxes.TRAINED[:NUM_TASKS]
        return [Task.ask(f"{split}-{s}", boxes.question(s), boxes.answer(s), seed=s) for s in seeds]

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, dict[str, JSON]]:
        """The boxes are those of the task."""
        self._seed = _seed_of(task)
        observation, info = await super().reset(task, seed=seed)
        return observation, dict(info)

    def reward(self, task: Task, answer: str) -> float:
        """1.0 for the value."""
        return boxes.is_right(_seed_of(task), answer)

    def expert(self, task: Task) -> Script:
        """Open each box on the way."""
        for box in boxes.path(_seed_of(task)):
            yield call(boxes.TOOL, box=box)
        yield say(boxes.answer(_seed_of(task)))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """Often wrong: it leaves something to learn."""
        *opened, said = boxes.guess(_seed_of(task), random.Random(rng.random()))
        for box in opened:
            yield call(boxes.TOOL, box=box)
        yield say(said)


def with_form(settings: TrainSettings) -> TrainSettings:
    """Settings of a run with those of how it is played."""
    form = TrainSettings(
        dialect="chat",
        chat_format="qwen3",
        apply_chat_template_kwargs=boxes.TEMPLATE,
        rollout_max_response_len=TURN_TOKENS,
        eval_episodes=len(boxes.HELD_OUT),
    )
    return {**settings, **form}


def _seed_of(task: Task) -> int:
    seed = task.metadata["seed"]
    assert isinstance(seed, int), "it is of one of the tasks here"
    return seed


def begun(folder: Path, trl: Path, *, steps: int, threads: int) -> Path:
    """The model after a warm start of so many steps: it calls the tool, and is right in a third of the tasks.

    trl: an interpreter with TRL, whose template of Qwen3 it gets.
    """
    _write_model(folder / "fresh", _template(trl))
    settings = TrainSettings(
        env=Boxes,
        hf_checkpoint=str(folder / "fresh"),
        output_dir=str(folder),
        name="begun",
        warm_start_steps=steps,
        warm_start_batch_size=32,
        num_rollout=0,
        skip_eval_before_train=True,
        num_threads=threads,
    )
    trained = agentrl.train(quiet=True, **with_form(settings))
    return trained.folder / "checkpoint"


def _template(trl: Path) -> str:
    code = "import trl, pathlib; print(pathlib.Path(trl.__file__).parent / 'chat_templates' / 'qwen3.jinja')"
    done = subprocess.run([str(trl), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1]).read_text(encoding="utf-8")


def _write_model(folder: Path, template: str) -> None:
    """A Qwen3 of the quickstart's shape with random weights; each name, value and call is a token of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [f"{word} {word}" for word in (*boxes.BOXES, *boxes.VALUES)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([template, _DEMONSTRATED, *words * 20], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    tokenizer.add_tokens([boxes.call_of(box) for box in boxes.BOXES])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", padding_side="left"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
