"""A code agent as one writes it for slime: tokens in, the sample's own bookkeeping, two named rewards."""

import re

from agentrl import ToolRejected
from agentrl.envs.graders import last_boxed, make_grader
from agentrl.tools import PythonTool
from agentrl.types import Task
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 8
HINT = "Nothing to do was found in that; write <code> ...</code> or <answer> ...</answer>.".replace(
    "<", "<\u2060"
)
TOOL = PythonTool(stateful=True, wall_s=5.0, cpu_s=5.0)


async def react(text, run):
    """What the world shows after a turn; None = it was an answer."""
    found = re.search(r"<(code|answer)>(.*?)</\1>", text, re.DOTALL)
    if found is None:
        return HINT
    if found[1] == "answer":
        return None
    try:
        return await run({"code": found[2].strip()})
    except ToolRejected as error:
        return str(error)


async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tool_call_count = 0
    async with TOOL.episode() as (tool,):
        for _ in range(MAX_TURNS):
            room = args.rollout_max_context_len - len(sample.tokens)
            if room <= 0:
                break
            params = {**sampling_params, "max_new_tokens": min(sampling_params["max_new_tokens"], room)}
            payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
            output = await post(url, payload)
            meta = output["meta_info"]
            sample.append_response_tokens(
                args,
                tokens=[item[1] for item in meta["output_token_logprobs"]],
                log_probs=[item[0] for item in meta["output_token_logprobs"]],
                meta_info=meta,
                text=output["text"],
            )
            if meta["finish_reason"]["type"] != "stop":
                return sample
            shown = await react(output["text"], tool.call)
            if shown is None:
                return sample
            sample.tool_call_count += 1
            shown = f"\n\n<interpreter>\n{shown}\n</interpreter>\n\n"
            tokens = state.tokenizer(shown, add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=tokens, trainable=False, text=shown)
    sample.status = Sample.Status.TRUNCATED
    return sample


async def reward_func(args, sample, **kwargs):
    found = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    if sample.status != Sample.Status.COMPLETED or not found or last_boxed(found[-1]) is None:
        return {"score": 0.0, "calls": sample.tool_call_count}
    right = await make_grader("math")(Task.ask("x", "", answer=sample.label), found[-1])
    return {"score": right, "calls": sample.tool_call_count}
