"""The table of functions by path: of each its signature, when it runs, what it may change, an example.

A hook has the name of its setting, in capitals. [Functions by path](functions.md) shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from agentrl.algorithms.advantages import AdvantageEstimator
from agentrl.algorithms.contract import (
    check_buffer_filter,
    check_conversion,
    check_correction,
    check_data_post_process,
    check_estimator,
    check_group_filter,
    check_post_process,
    check_reducer,
    check_rollout_filter,
)
from agentrl.algorithms.conversion import Conversion, DataPostProcess
from agentrl.algorithms.corrections import CorrectionFunction
from agentrl.algorithms.distillation import PrivilegedContext, check_privileged_context
from agentrl.algorithms.filters import BufferFilter, GroupFilter, RolloutFilter
from agentrl.algorithms.post_process import RewardPostProcess
from agentrl.algorithms.weights import WeightFunction
from agentrl.assembly.functions import CALLBACK, Hook, check_takes
from agentrl.data import DataSource
from agentrl.envs.generate import Generate
from agentrl.envs.sample_hook import SampleHook
from agentrl.envs.scoring import AnswerReward
from agentrl.rollout.batch_functions import (
    AfterPublishing,
    RolloutLog,
    check_after_publishing,
    check_rollout_log,
)
from agentrl.rollout.own_evaluation import EvalFunction, check_eval_function
from agentrl.rollout.own_rollout import RolloutFunction, check_rollout
from agentrl.types import Episode

if TYPE_CHECKING:
    from agentrl.losses import Loss


def _check_loss(loss: Loss) -> None:
    # Environments and endpoints do without torch.
    from agentrl.losses import check_loss

    check_loss(loss)


CUSTOM_GENERATE_FUNCTION_PATH: Hook[Generate] = Hook(
    "generate function",
    "async (EpisodeInPlay) -> None",
    runs="to play an episode, in training and in evaluations",
    changes="turns, their order, and whole prompts",
    example="[second_look](../examples/second_look/README.md)",
)
ROLLOUT_SAMPLE_HOOK_PATH: Hook[SampleHook] = Hook(
    "sample hook",
    "(Episode) -> Episode | None; sync or async",
    runs="when an episode has ended, before its rewards",
    changes="counts, rewards of steps, completed or truncated",
    example="[brief_steps](#an-episode-that-has-ended)",
)
REWARD: Hook[AnswerReward] = Hook(
    "reward",
    "(Task, str) -> float or named parts, of which score is the reward; sync or async",
    runs="when an answer is given, in environments that take a reward; with `env_reward_weight` in any",
    changes="the score of a rollout",
    example="`agentrl.envs.graders:exact_match`",
)
GROUP_REWARD: Hook[Callable[[Sequence[Episode]], Sequence[float]]] = Hook(
    "group reward",
    "(Sequence[Episode]) -> Sequence[float]; sync or async; or a GroupReward",
    runs="when the siblings of a group have ended",
    changes="the score of a rollout",
    example="[ahead](../examples/second_look/README.md)",
)
DYNAMIC_SAMPLING_FILTER_PATH: Hook[GroupFilter] = Hook(
    "filter",
    "(Group) -> str | None",
    runs="when a group has ended",
    changes="whether another one is played for it: the reason",
    example="`agentrl.algorithms.filters:zero_std`",
    check=check_group_filter,
)
ROLLOUT_FUNCTION_PATH: Hook[RolloutFunction] = Hook(
    "rollout function",
    "async (RolloutInPlay) -> Sequence[Group]",
    runs="to play a batch",
    changes="which prompts are played, when, and which groups count",
    example="[hard_first](#a-batch-in-its-own-way)",
    check=check_rollout,
)
BUFFER_FILTER_PATH: Hook[BufferFilter] = Hook(
    "filter",
    "(Sequence[Group], int) -> Sequence[Group]",
    runs="when all groups of an over-sampled batch have ended",
    changes="which of them the batch takes",
    example="`agentrl.algorithms.filters:highest_std`",
    check=check_buffer_filter,
)
DATA_BUFFER_FILTER_PATH: Hook[BufferFilter] = Hook(
    "filter",
    "(Sequence[Group], int) -> Sequence[Group]",
    runs="when a batch takes groups of the data buffer",
    changes="which of them it takes",
    example="`agentrl.algorithms.filters:highest_std`",
    check=check_buffer_filter,
)
ROLLOUT_SAMPLE_FILTER_PATH: Hook[RolloutFilter] = Hook(
    "filter",
    "(Sequence[Group]) -> Mapping[RolloutId, str]",
    runs="when a batch is complete",
    changes="rollouts are taken out of the loss, each with a reason",
    example="`agentrl.algorithms.filters:truncated`",
    check=check_rollout_filter,
)
CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH: Hook[Conversion] = Hook(
    "conversion",
    "(Sequence[Group], Sequence[Sample]) -> Sequence[Sample]",
    runs="when a batch is complete, and its tokens obey the laws",
    changes="single tokens are taken out of the loss; extras for the loss",
    example="[first_turns](#samples)",
    check=check_conversion,
)
CUSTOM_REWARD_POST_PROCESS_PATH: Hook[RewardPostProcess] = Hook(
    "reward post-processing",
    "(Sequence[Group]) -> Mapping[RolloutId, float]",
    runs="when a batch is complete",
    changes="the scores that count, beside those that were given",
    example="[capped](#scores-of-a-whole-batch)",
    check=check_post_process,
)
PRIVILEGED_CONTEXT_PATH: Hook[PrivilegedContext] = Hook(
    "privileged context",
    "(Task, str) -> str | None",
    runs="when an episode begins, for each agent",
    changes="what a teacher reads besides the prompt",
    example="[solution](algorithms.md#a-teacher)",
    check=check_privileged_context,
)
DATA_SOURCE_PATH: Hook[Callable[..., DataSource]] = Hook(
    "source of prompts",
    "a class, or (seed) -> DataSource",
    runs="once; then task(ordinal) for each prompt",
    changes="the prompts",
    example="[Squares](your-own-data.md#a-source-of-your-own)",
)
CUSTOM_ADVANTAGE_FUNCTION_PATH: Hook[AdvantageEstimator] = Hook(
    "estimator",
    "(groups, Tokens, TokenScores) -> Advantages",
    runs="once for a batch",
    changes="advantages",
    example="[outcome](algorithms.md#one-of-your-own)",
    check=check_estimator,
)
CUSTOM_TIS_FUNCTION_PATH: Hook[CorrectionFunction] = Hook(
    "correction",
    "(Tokens, TokenScores) -> factors [N]",
    runs="once for a batch, with correction = custom",
    changes="a factor of each advantage; 0 takes a token out",
    example="[rooted](algorithms.md#one-of-your-own)",
    check=check_correction,
)
ROLLOUT_DATA_POSTPROCESS_PATH: Hook[DataPostProcess] = Hook(
    "post-processing of data",
    "(Sequence[Sample], Scores) -> Sequence[Sample]",
    runs="when the samples of a batch have been scored, before their advantages",
    changes="single tokens are taken out of the loss; extras for the loss",
    example="[likely](#samples)",
    check=check_data_post_process,
)
CUSTOM_PG_LOSS_REDUCER_FUNCTION_PATH: Hook[WeightFunction] = Hook(
    "loss reducer",
    "(samples of each group) -> weights [T] of each sample",
    runs="once for an optimizer step",
    changes="the weights of tokens, in place of loss_weighting",
    example="[equal](algorithms.md#one-of-your-own)",
    check=check_reducer,
)
CUSTOM_LOSS_FUNCTION_PATH: Hook[Loss] = Hook(
    "loss",
    "(TokenOutputs, LossInputs) -> LossOutput",
    runs="for each micro-batch",
    changes="the loss",
    example="[reinforce](algorithms.md#one-of-your-own)",
    check=_check_loss,
)
CUSTOM_UPDATE_WEIGHT_POST_WRITE_PATH: Hook[AfterPublishing] = Hook(
    "function after publishing",
    "(PublishReport) -> object; sync or async",
    runs="when the engine serves new weights",
    changes="nothing",
    example="[noted](#metrics-and-events)",
    check=check_after_publishing,
)
EVAL_FUNCTION_PATH: Hook[EvalFunction] = Hook(
    "evaluation function",
    "async (EvaluationInPlay) -> Mapping[str, float] | None",
    runs="in place of each evaluation in a run",
    changes="what is played; metrics of its own",
    example="[agreement](#an-evaluation-in-its-own-way)",
    check=check_eval_function,
)
CUSTOM_ROLLOUT_LOG_FUNCTION_PATH: Hook[RolloutLog] = Hook(
    "rollout log function",
    "(int, Sequence[Group]) -> Mapping[str, float]",
    runs="after each iteration, with all groups that were played for it",
    changes="metrics of its own",
    example="[thinking](#metrics-and-events)",
    check=check_rollout_log,
)

CUSTOM_MEGATRON_INIT_PATH: Hook[Callable[..., object]] = Hook(
    "function in Megatron's ranks",
    "(MegatronConfig) -> object",
    runs="in each of Megatron's ranks, when its process groups are there and no network is",
    changes="Megatron itself",
    example="[deterministic](megatron.md#functions-of-your-own)",
    check=partial(check_takes, arguments=1),
)
CUSTOM_MODEL_PROVIDER_PATH: Hook[Callable[..., object]] = Hook(
    "function in Megatron's ranks",
    "(**arguments of GPTModel) -> GPTModel",
    runs="in each of Megatron's ranks, for each stage of a network",
    changes="the layers, under the names of GPTModel's parameters",
    example="[noted](megatron.md#functions-of-your-own)",
)
CUSTOM_MEGATRON_BEFORE_LOG_PROB_HOOK_PATH: Hook[Callable[..., object]] = Hook(
    "function in Megatron's ranks",
    "(role, stages) -> object",
    runs="in each of Megatron's ranks, before a network scores samples",
    changes="the modules of the network",
    example="[in_eval_mode](megatron.md#functions-of-your-own)",
    check=partial(check_takes, arguments=2),
)
CUSTOM_MEGATRON_BEFORE_TRAIN_STEP_HOOK_PATH: Hook[Callable[..., object]] = Hook(
    "function in Megatron's ranks",
    "(role, stages) -> object",
    runs="in each of Megatron's ranks, before a network takes an optimizer step",
    changes="the modules of the network",
    example="[in_eval_mode](megatron.md#functions-of-your-own)",
    check=partial(check_takes, arguments=2),
)
CUSTOM_MEGATRON_AFTER_TRAIN_STEP_HOOK_PATH: Hook[Callable[..., object]] = Hook(
    "function in Megatron's ranks",
    "(role, stages) -> object",
    runs="in each of Megatron's ranks, after a network took an optimizer step",
    changes="the modules of the network",
    example="[in_eval_mode](megatron.md#functions-of-your-own)",
    check=partial(check_takes, arguments=2),
)
CUSTOM_MEGATRON_BEFORE_SAVE_HOOK_PATH: Hook[Callable[..., object]] = Hook(
    "function in Megatron's ranks",
    "(role, stages) -> object",
    runs="in each of Megatron's ranks, before the state of a network is saved",
    changes="the modules of the network",
    example="[in_eval_mode](megatron.md#functions-of-your-own)",
    check=partial(check_takes, arguments=2),
)


def hooks() -> dict[str, Hook[object]]:
    """All of them, by the setting that names one."""
    own = {name.lower(): hook for name, hook in globals().items() if isinstance(hook, Hook)}
    return own | {CALLBACK.noun: own.pop(CALLBACK.noun)}
