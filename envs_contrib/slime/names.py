"""The modules of slime whose names its functions import, answered by agentrl.

They take these names whether slime is installed or not. Its other modules stay its own; where slime is not
installed, there are none.

utils.types                                 Sample
utils.http_utils                            post: /generate is the run's engine, whatever that is
utils.processing_utils                      load_tokenizer: the run's
utils.misc                                  load_function, SingletonMeta
rollout.sglang_rollout                      GenerateState: the run's; get_model_url; generate: one turn
rollout.filter_hub.base_types               DynamicFilterOutput
rollout.filter_hub.dynamic_sampling_filters check_reward_nonzero_std
rollout.rm_hub.math_dapo_utils              compute_score
rollout.rm_hub.math_utils                   extract_answer
rollout.rm_hub.f1                           f1_score
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar

from agentrl.errors import UserError
from agentrl.types.seams import Tokenizer
from envs_contrib.slime import batches, graders
from envs_contrib.slime.loading import load_function
from envs_contrib.slime.policy import HOST, PORT, engine, meta_info, post
from envs_contrib.slime.sample import Sample

_CONCURRENT = 512


class SingletonMeta(type):
    """A class of which there is one object."""

    _instances: ClassVar[dict[type, object]] = {}

    def __call__(cls, *args: object, **kwargs: object) -> object:
        """The object; the first call makes it."""
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


class GenerateState:
    """The tokenizer and the sampling of the episode in play."""

    aborted = False
    processor = None
    dp_rank = 0

    def __init__(self, args: object) -> None:
        self.args = args
        self.semaphore = asyncio.Semaphore(_CONCURRENT)

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's, of Hugging Face."""
        return engine().tokenizer

    @property
    def sampling_params(self) -> dict[str, object]:
        """As a generate function gets them."""
        return engine().sampling_params

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """There is one engine to ask."""
        yield 0


def get_model_url(args: object, model_name: str, endpoint: str = "/generate") -> str:
    """The address of the policy.

    Raises:
        UserError: another model is asked for.
    """
    del args
    if model_name not in ("default", "actor"):
        raise UserError(
            f"there is no model {model_name!r} at the policy's address; serve it and post to its own."
        )
    return f"http://{HOST}:{PORT}{endpoint}"


def load_tokenizer(*args: object, **kwargs: object) -> Tokenizer:
    """The run's tokenizer, whatever folder is asked for."""
    del args, kwargs
    return engine().tokenizer


async def generate(args: object, sample: Sample, sampling_params: Mapping[str, object]) -> Sample:
    """slime's own generate function: one turn after the sample's tokens."""
    own = engine()
    if not sample.tokens:
        sample.tokens, _ = own.prompt_of({"text": sample.prompt})
    completion = await own.sample(sample.tokens, sampling_params)
    sample.append_response_tokens(
        args,
        tokens=completion.token_ids.tolist(),
        log_probs=completion.logprobs.tolist(),
        meta_info=meta_info(completion, len(sample.tokens)),
        text=own.text_of(completion, sampling_params),
    )
    return sample


_MODULES: Mapping[str, Mapping[str, object]] = {
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.http_utils": {"post": post},
    "slime.utils.misc": {"load_function": load_function, "SingletonMeta": SingletonMeta},
    "slime.utils.processing_utils": {"load_tokenizer": load_tokenizer},
    "slime.rollout.sglang_rollout": {
        "GenerateState": GenerateState,
        "get_model_url": get_model_url,
        "generate": generate,
    },
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": batches.DynamicFilterOutput},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": batches.check_reward_nonzero_std
    },
    "slime.rollout.rm_hub": {
        "f1_score": graders.f1_score,
        "compute_score_dapo": graders.compute_score,
        "extract_boxed_answer": graders.extract_answer,
    },
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": graders.compute_score},
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": graders.extract_answer,
    },
    "slime.rollout.rm_hub.f1": {"f1_score": graders.f1_score},
}


def install() -> None:
    """Make the names importable. Once is enough.

    Raises:
        UserError: some code has imported slime's own modules before, and holds what they gave it.
    """
    if any(name in sys.modules and not isinstance(sys.modules[name], _Module) for name in _MODULES):
        raise UserError("slime is imported already; import envs_contrib.slime before it.")
    for name in _MODULES:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            _add(".".join(parts[:end]))


class _Module(ModuleType):
    """A module that says which name it lacks."""

    def __getattr__(self, name: str) -> object:
        """Called for a name that it lacks."""
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(_MODULES.get(self.__name__, ()))) or "only modules"
        raise AttributeError(f"{self.__name__} has no {name} here; it has {known}")


def _add(name: str) -> None:
    if isinstance(sys.modules.get(name), _Module):
        return
    folders = _folders(name)
    module = _Module(name)
    module.__path__ = list(folders)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    vars(module).update(_MODULES.get(name, {}))
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def _folders(name: str) -> Sequence[str]:
    """Where slime's own modules below this name are: those that are not answered here can be imported."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []
