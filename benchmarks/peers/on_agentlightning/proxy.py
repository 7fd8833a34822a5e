"""agent-lightning's proxy before a chat endpoint, with a store in its process.

    python proxy.py '{"upstream": "http://127.0.0.1:PORT/v1", "port": PORT}'

It prints {"ready": true}. For a number on a line of its standard input so many rollouts begin, and their
addresses are printed; for an empty line, how many requests are recorded. It ends with its input.
"""

import asyncio
import json
import sys

from agentlightning import InMemoryLightningStore, LLMProxy

REQUEST = "raw_gen_ai_request"


async def main(upstream: str, port: int) -> None:
    """Serve until the standard input ends."""
    # The proxy prints a banner, among others.
    replies, sys.stdout = sys.stdout, sys.stderr
    store = InMemoryLightningStore(thread_safe=True)
    parameters = {"model": "openai/m", "api_base": upstream, "api_key": "unused"}
    models = [{"model_name": "m", "litellm_params": parameters}]
    proxy = LLMProxy(port=port, model_list=models, store=store, launch_mode="thread", host="127.0.0.1")
    await proxy.start()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        reply = await answer(store, line.strip(), f"http://127.0.0.1:{port}")
        print(json.dumps(reply), file=replies, flush=True)
    await proxy.stop()


async def answer(store: InMemoryLightningStore, number: str, url: str) -> dict[str, object]:
    """The addresses of so many rollouts; without a number, how many requests are recorded."""
    if number:
        begun = [await store.start_rollout(input={}) for _ in range(int(number))]
        paths = [f"rollout/{one.rollout_id}/attempt/{one.attempt.attempt_id}" for one in begun]
        return {"urls": [f"{url}/{path}/v1" for path in paths]}
    rollouts = await store.query_rollouts()
    spans = [span for one in rollouts for span in await store.query_spans(one.rollout_id)]
    return {"recorded": sum(span.name == REQUEST for span in spans)}


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
