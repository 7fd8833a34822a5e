"""A search agent as one writes it for slime: text in, a mask of one's own, a reward of one's own."""

import re

from envs_contrib.hop_search import HopSearch
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 5
# As agentrl shows it: results hold no markup, so that no document can write as the model.
HINT = "Nothing to do was found in that; write <search> ...</search> or <answer> ...</answer>.".replace(
    "<", "<\u2060"
)
WORLD = HopSearch()


async def look_up(query):
    return next(iter(WORLD.knowledge_base.index.search(query)), "nothing found")


async def react(text):
    """What the world shows after a turn; None = it was an answer."""
    found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    if found is None:
        return HINT
    return None if found[1] == "answer" else await look_up(found[2].strip())


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask, logprobs = "", [], [], []
    sample.status = Sample.Status.TRUNCATED
    for _ in range(MAX_TURNS):
        payload = {
            "text": sample.prompt + response,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        tokens = [item[1] for item in meta["output_token_logprobs"]]
        response += output["text"]
        ids += tokens
        mask += [1] * len(tokens)
        logprobs += [item[0] for item in meta["output_token_logprobs"]]
        if meta["finish_reason"]["type"] == "length":
            break
        shown = await react(output["text"])
        if shown is None:
            sample.status = Sample.Status.COMPLETED
            break
        shown = f"<information> {shown}</information>"
        tokens = state.tokenizer(shown, add_special_tokens=False)["input_ids"]
        response += shown
        ids += tokens
        mask += [0] * len(tokens)
        logprobs += [0.0] * len(tokens)
    sample.tokens = prompt_ids + ids
    sample.response, sample.response_length = response, len(ids)
    sample.loss_mask, sample.rollout_log_probs = mask, logprobs
    return sample


async def reward_func(args, sample, **kwargs):
    if sample.status != Sample.Status.COMPLETED:
        return 0.0
    answer = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)[-1]
    return float(answer.strip().lower() == sample.label.lower())
