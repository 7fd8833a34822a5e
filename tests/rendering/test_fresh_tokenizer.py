from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentrl.rendering.fresh_tokenizer import MARKERS, MODEL_MAX_LENGTH, train_tokenizer

CORPUS = ["Where was Ka\npo born?", "Ka\npo was born in Mi\nda", "Ben has 12 pens", "12 34 12 34"] * 5
TAGS = ("<calc>", "</calc>", "<answer>", "</answer>")
TOKENIZER = train_tokenizer(CORPUS, special_tokens=TAGS, vocab_size=400)


def _pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([token]) for token in TOKENIZER.encode(text, add_special_tokens=False)]


@given(
    st.text() | st.lists(st.sampled_from([*MARKERS, *TAGS, "Ka", "po", " ", "1", "<", "é🎉"])).map("".join)
)
def test_any_text_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.text(), st.text())
def test_special_tokens_separate_the_text_around_them(before, after):
    ids = TOKENIZER.encode(f"{before}<calc>{after}", add_special_tokens=False)
    apart = [TOKENIZER.encode(text, add_special_tokens=False) for text in (before, "<calc>", after)]
    assert ids == [token for part in apart for token in part]


def test_markers_and_tags_are_one_token_each_and_come_first():
    ids = [TOKENIZER.encode(token, add_special_tokens=False) for token in (*MARKERS, *TAGS)]
    assert ids == [[number] for number in range(len(MARKERS) + len(TAGS))]


def test_words_include_their_blank_and_digits_are_single_tokens():
    assert _pieces(" Ben has 1234") == [" Ben", " has", " ", "1", "2", "3", "4"]
    assert _pieces(" born?  Kapo") == [" born", "?", " ", " Ka", "po"]
    assert _pieces("12*34") == ["1", "2", "*", "3", "4"]


def test_the_same_corpus_gives_the_same_tokenizer():
    again = train_tokenizer(CORPUS, special_tokens=TAGS, vocab_size=400)
    assert again.get_vocab() == TOKENIZER.get_vocab()


def test_the_vocabulary_is_bounded_and_may_be_smaller():
    smallest = 256 + len(MARKERS) + len(TAGS)
    assert len(train_tokenizer(CORPUS, special_tokens=TAGS, vocab_size=smallest)) == smallest
    assert len(train_tokenizer(CORPUS, special_tokens=TAGS, vocab_size=smallest + 3)) == smallest + 3
    assert len(train_tokenizer(CORPUS, special_tokens=TAGS, vocab_size=5000)) < smallest + 60
    with pytest.raises(ValueError, match=f"give at least {smallest}"):
        train_tokenizer(CORPUS, special_tokens=TAGS, vocab_size=smallest - 1)


def test_a_tag_that_is_also_a_marker_is_added_once():
    tokenizer = train_tokenizer(CORPUS, special_tokens=("<|end|>", "<calc>", "<calc>"), vocab_size=400)
    assert tokenizer.convert_tokens_to_ids("<calc>") == len(MARKERS)


def test_the_chat_template_ends_where_the_assistant_writes():
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Hi."},
        {"role": "tool", "content": "42"},
    ]
    text = "<|system|> Be brief.<|end|><|user|> Hi?<|end|><|assistant|> Hi.<|end|><|user|> 42<|end|>"
    assert TOKENIZER.apply_chat_template(turns, tokenize=False) == text
    prompt = TOKENIZER.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == f"{text}<|assistant|>"


def test_a_saved_tokenizer_loads_as_it_was(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<calc>12*3</calc> Kapo\t🎉"
    assert loaded.encode(text, add_special_tokens=False) == TOKENIZER.encode(text, add_special_tokens=False)
    assert loaded.decode(loaded.encode(text, add_special_tokens=False)) == text
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.pad_token, loaded.eos_token) == ("<|pad|>", "<|end|>")
    assert loaded.model_max_length == MODEL_MAX_LENGTH == 4096
