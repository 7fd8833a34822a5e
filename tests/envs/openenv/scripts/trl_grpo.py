"""TRL's GRPOTrainer trains a small random model by the program of the guide, on a served Calculator.

A token of the model is a whole action: it calls the tool, or says a number. All else it could say is
suppressed, so that a random model does something, and a few steps show whether the rewards arrive.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PROGRAM, URL = sys.argv[1:]
EXPRESSION, ANSWER, WRONG = json.loads(sys.stdin.readline())
CALL = {"name": "calc", "arguments": {"expression": EXPRESSION}}
ACTIONS = [f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>", ANSWER, WRONG]
FOLDER = Path("model")


def write_model():
    """The ids that are suppressed."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(ACTIONS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", padding_side="left"
    )
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    fast.save_pretrained(FOLDER)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(FOLDER)
    said = {fast.eos_token_id, *fast.convert_tokens_to_ids(ACTIONS)}
    return [number for number in range(len(fast)) if number not in said]


settings = {
    "max_steps": 16,
    "learning_rate": 0.01,
    "use_cpu": True,
    "bf16": False,
    "seed": 1,
    "generation_kwargs": {"suppress_tokens": write_model()},
}
sys.argv = [PROGRAM, URL, str(FOLDER), "1", json.dumps(settings)]
runpy.run_path(PROGRAM, run_name="__main__")
log = json.loads(Path("grpo/trainer_state.json").read_text())["log_history"]
steps = [entry for entry in log if "reward" in entry]
new, old = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in ("grpo", FOLDER))
changed = [name for name, value in new.items() if not torch.equal(value.float(), old[name].float())]
names = ("reward", "tools/call_frequency", "tools/failure_frequency")
print(json.dumps({"steps": [[entry[name] for name in names] for entry in steps], "changed": len(changed)}))
