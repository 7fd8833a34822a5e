"""Tokenizers with the special tokens of each family, and chat templates for tests."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

from agentrl.rendering.chat import FamilyRenderer
from agentrl.rendering.template import TemplateRenderer

CORPUS = [
    "Where was Kalor born? Kalor was born in Tirak, as all of them were.",
    'You may call one of these functions: {"name": "add", "arguments": {"a": 12, "b": 30}}',
    "system user assistant tool ipython observation environment",
    "12 and 30 is 42; true, false and null; <x> & </x> - [1, 2]",
] * 3

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
CHATML += ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
LLAMA += ("<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
GLM += ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
GLM += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")

# Calls in tags; reasoning is dropped from turns before the last question.
TAGGED_CALLS = """
{%- set question = namespace(last=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set question.last = messages.index(m) -%}{%- endfor -%}
{%- if tools -%}<|im_start|>system
Functions: {% for tool in tools %}{{ tool | tojson }} {% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > question.last -%}<think>
{{ m.reasoning_content }}
</think>

{% endif -%}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

# A call is the whole turn.
UNDELIMITED_CALLS = """<|begin_of_text|>
{%- for m in messages -%}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if loop.first and tools %}Functions: {% for tool in tools %}{{ tool | tojson }} {% endfor %}

{% endif %}{% if m.tool_calls -%}
{%- for c in m.tool_calls -%}
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{%- endfor -%}
{%- else -%}{{ m.content }}{%- endif -%}<|eot_id|>
{%- endfor -%}{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""


@lru_cache
def tokenizer(kind: str, special: tuple[str, ...], end: str, template: str | None = None):
    """A tokenizer of one of three kinds: byte-level, sentencepiece (blanks as ▁, bytes), wordpiece."""
    added = [AddedToken(token, normalized=False, special=True) for token in special]
    trainer = {"special_tokens": added, "vocab_size": 700, "show_progress": False}
    if kind == "byte-level":
        built = Tokenizer(BPE())
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        train = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **trainer)
    elif kind == "sentencepiece":
        built = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        built.normalizer = normalizers.Replace(" ", "▁")
        built.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        fallback = [AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)]
        unknown = AddedToken("<unk>", normalized=False, special=True)
        train = trainers.BpeTrainer(**{**trainer, "special_tokens": [unknown, *added, *fallback]})
    else:
        built = Tokenizer(WordPiece(unk_token="[UNK]"))
        built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        built.decoder = decoders.WordPiece(cleanup=False)
        unknown = AddedToken("[UNK]", normalized=False, special=True)
        train = trainers.WordPieceTrainer(**{**trainer, "special_tokens": [unknown, *added]})
    built.train_from_iterator(CORPUS, train)
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        eos_token=end,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


KINDS = ("byte-level", "sentencepiece", "wordpiece")
FORMATS = {
    "qwen3": lambda kind: FamilyRenderer(tokenizer(kind, CHATML, "<|im_end|>"), "qwen3"),
    "llama-3": lambda kind: FamilyRenderer(tokenizer(kind, LLAMA, "<|eot_id|>"), "llama-3"),
    "glm-4.5": lambda kind: FamilyRenderer(tokenizer(kind, GLM, "<|endoftext|>"), "glm-4.5"),
    "template, tagged calls": lambda kind: TemplateRenderer(
        tokenizer(kind, CHATML, "<|im_end|>", TAGGED_CALLS)
    ),
    "template, undelimited calls": lambda kind: TemplateRenderer(
        tokenizer(kind, LLAMA, "<|eot_id|>", UNDELIMITED_CALLS)
    ),
}


@lru_cache
def renderer(form: str, kind: str):
    return FORMATS[form](kind)
