"""A tokenizer for a model that is trained from scratch: byte-level BPE on the text of its environment.

The blank before a word belongs to its token, so that the word is the same token after a tag, in a question
and in a document: copying it is copying a token. Every digit is a token of its own, and no merge joins a
word with other characters. All 256 bytes are in the vocabulary, so any text survives the round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
MARKERS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
MODEL_MAX_LENGTH = 4096

_PIECES = r" ?[^\W\d_]+|\s|."
CALL_MARKERS = ("<|call|>", "<|end_call|>")
"""The opening and the closing marker of a call in the chat dialect."""
_CALL = '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
_CHAT_TEMPLATE = (
    "{% if tools %}<|system|>"
    "{% for tool in tools %} {{ tool.function | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{{ '<|user|>' if message.role == 'tool' else '<|' + message.role + '|>' }} {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<|call|> " + _CALL + "<|end_call|>{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast


def train_tokenizer(
    corpus: Iterable[str], *, special_tokens: Sequence[str], vocab_size: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer with a chat template on `corpus`. The same corpus gives the same tokenizer.

    special_tokens: single tokens besides MARKERS, such as a dialect's opening and closing tags.
    vocab_size: at most so many tokens in all; fewer where the corpus has no more pairs to merge.

    Raises:
        ValueError: vocab_size is below the number of bytes (256) and special tokens.
    """
    special = list(dict.fromkeys((*MARKERS, *special_tokens)))
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special)} special tokens come first; "
            f"give at least {256 + len(special)}"
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = PreTokenizers(
        [Split(Regex(_PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in special],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    # Wherever text is used, a tag and a blank come before it.
    tokenizer.train_from_iterator((f" {text}" for text in corpus), trainer)
    return _wrap(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL_MAX_LENGTH,
    )
