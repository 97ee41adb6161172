"""Supervised pairs: the end token, the choice among demonstrations, and errors."""

import numpy as np
import pytest

from dapo_jax.config import DataConfig
from dapo_jax.data.prompts import PairSource, PromptSource
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer
from tests.text import folders

TOKENIZER = ByteTokenizer()
ROWS = [{"prompt": f"{n}", "answer": f"{n}", "responses": [f"{n}{way}" for way in "abcd"]} for n in range(20)]


def source(rows=ROWS, tokenizer=TOKENIZER, *, seed=0, max_response_tokens=16, **options):
    prompts = PromptSource(rows, tokenizer, **({"seed": seed, "max_prompt_tokens": 64} | options))
    return PairSource(prompts, tokenizer, seed=seed, max_response_tokens=max_response_tokens)


def text(pair):
    return tuple(TOKENIZER.decode(tokens) for tokens in pair)


def test_response_ends_with_the_end_token_and_the_prompt_does_not():
    prompt, response = source([{"prompt": "1+1", "answer": "2", "response": "=2"}])[0]
    np.testing.assert_array_equal(prompt, TOKENIZER.encode("1+1"))
    np.testing.assert_array_equal(response, [*TOKENIZER.encode("=2"), TOKENIZER.eos_id])
    assert response.dtype == np.int32


@pytest.mark.parametrize(
    ("prompt", "chat", "end"),
    [("1+1", False, 0), ("1+1", True, 2), ([{"role": "user", "content": "1+1"}], False, 2)],
)
def test_a_response_to_a_conversation_ends_as_the_template_ends_a_turn(prompt, chat, end):
    """A base model of Qwen: eos_token is <|endoftext|> (id 0), and the template writes <|im_end|> (id 2)."""
    tokenizer = HuggingFaceTokenizer(folders.files_of(eos_token="<|endoftext|>"))
    rows = [{"prompt": prompt, "answer": "2", "response": "=2"}]
    _, response = source(rows, tokenizer, prompt_format=PromptFormat(DataConfig(chat=chat)))[0]
    np.testing.assert_array_equal(response, [*tokenizer.encode("=2"), end])


def conversation_pair(response, template=folders.CHATML, **kwargs):
    tokenizer = HuggingFaceTokenizer(folders.files_of(template=template, eos_token="<|im_end|>"))
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "response": response}]
    data = DataConfig(chat_template_kwargs=kwargs)
    _, tokens = source(rows, tokenizer, prompt_format=PromptFormat(data), max_response_tokens=64)[0]
    return tokenizer.spelled(tokens)


def test_an_end_token_in_the_response_is_its_end():
    """A row of tool calls, for example, ends with a token of its own. The tokens after an end token would never be sampled."""
    assert conversation_pair("2") == conversation_pair("2<|im_end|>") == "2<|im_end|>"
    for rest in ("\n", "<|im_end|>"):
        with pytest.raises(ValueError, match=r"row 0: .* end token 2 at position 1 of 2"):
            conversation_pair("2<|im_end|>" + rest)


OPENED = folders.CHATML.replace("assistant\n", "assistant\n{% if thinking %}<think>\n{% endif %}")


def test_a_response_continues_the_thoughts_that_the_prompt_opens():
    """As with the templates of DeepSeek-R1 and Qwen3.5."""
    whole = "<think>\n1 and 1</think>2"
    assert conversation_pair("1 and 1</think>2", OPENED, thinking=True) == "1 and 1</think>2<|im_end|>"
    assert conversation_pair(whole, OPENED) == whole + "<|im_end|>"
    for response in (whole, "2", "1 and 1</think>"):
        with pytest.raises(ValueError, match=r"row 0: .*'<think>'.* data\.chat_template_kwargs"):
            conversation_pair(response, OPENED, thinking=True)


def test_pair_depends_on_seed_and_place_alone():
    forwards = [text(source()[i]) for i in range(60)]
    fresh = source()
    assert [text(fresh[i]) for i in reversed(range(60))] == forwards[::-1]
    assert [text(source(seed=1)[i]) for i in range(60)] != forwards


def test_the_response_is_one_of_the_row_and_epochs_choose_again():
    pairs = source()
    shown = [dict(text(pairs[i]) for i in span) for span in (range(20), range(20, 40))]
    for epoch in shown:
        assert len(epoch) == 20
        assert all(response[:-1] == prompt and response[-1] in "abcd" for prompt, response in epoch.items())
    assert shown[0] != shown[1]


def test_prompts_come_in_the_order_of_the_prompt_source():
    prompts = PromptSource(ROWS, TOKENIZER, seed=0, max_prompt_tokens=16)
    pairs = source()
    assert [text(pairs[i])[0] for i in range(40)] == [prompts[i].text for i in range(40)]


def test_response_that_cannot_be_tokenized_names_the_row():
    rows = [{"prompt": "1", "answer": "1", "response": "x"}]
    pairs = source(rows, CharTokenizer("1"))
    with pytest.raises(ValueError, match="row 0: character 'x' at position 0"):
        pairs[0]


def test_end_token_counts_towards_the_response_limit():
    rows = [{"prompt": "1", "answer": "1", "response": "1234"}]
    assert len(source(rows, max_response_tokens=5)[0][1]) == 5
    with pytest.raises(ValueError, match=r"row 0: .* 5 tokens, more than max_response_tokens=4"):
        source(rows, max_response_tokens=4)[0]


@pytest.mark.parametrize(
    "extra", [{}, {"responses": []}, {"responses": "ab"}, {"responses": [1]}, {"response": None}]
)
def test_row_without_a_usable_demonstration_is_refused(extra):
    with pytest.raises(ValueError, match="row 0 needs a demonstration"):
        source([{"prompt": "1", "answer": "1"} | extra])[0]
