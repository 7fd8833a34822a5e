"""Functions that were written for slime, as functions of agentrl. They run unchanged.

    from envs_contrib.slime import filter_of, generate_of

    generate = generate_of("generate_with_search.generate", "generate_with_search.reward_func")
    not_all_equal = filter_of("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std")

In a file `my_functions.py` of these lines, they are `my_functions.generate` and
`my_functions.not_all_equal`, for `custom_generate_function_path` and
`dynamic_sampling_filter_path`. A run's tokens and logprobs are those that
its engine sampled; where a function changed one of them, the episode fails with a sentence.

Importing this package makes the names available that such functions import (`slime.utils.types.Sample`,
`slime.utils.http_utils.post`, `slime.rollout.sglang_rollout.GenerateState`, ...), whether slime is installed
or not: `post` reaches the engine of the run, whatever it is. `envs_contrib.slime.names` has a table of them.
"""

from envs_contrib.slime.batches import filter_of, post_process_of, sample_filter_of
from envs_contrib.slime.episodes import generate_of, group_reward_of
from envs_contrib.slime.names import install
from envs_contrib.slime.sample import Sample

install()

__all__ = ["Sample", "filter_of", "generate_of", "group_reward_of", "post_process_of", "sample_filter_of"]
