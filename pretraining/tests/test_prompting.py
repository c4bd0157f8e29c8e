"""Answers by the likelihood of options: how prompts are written, and that the likeliest option is taken."""

import json

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.data.text_tokenizer import ByteTokenizer
from fasttfm_pretraining.decoding import prompting
from fasttfm_pretraining.decoding.prompting import Example, Prompting, option_scores, read_examples
from fasttfm_pretraining.models.gpt import GPT

EXAMPLES = [Example({"text": f"question {number}"}, ["yes", "no"], "yes") for number in range(4)]


def gpt(max_length=64):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=261, d_model=16, heads=2, d_ff=32, layers=1, max_length=max_length))


def test_shots_are_solved_examples_and_never_the_question_itself():
    prompting = Prompting(template="Q: {text}\nA: {answer}.", shots=2)
    for number in range(4):
        *solved, question = prompting.prompt(EXAMPLES, number).split("\n\n")
        assert question == f"Q: question {number}\nA: "
        assert len(set(solved)) == 2
        assert all(each.endswith("A: yes") and f"question {number}" not in each for each in solved)
    assert Prompting(template="{text} TL;DR: {answer}").prompt(EXAMPLES, 0) == "question 0 TL;DR: "


def test_scores_are_the_sums_of_each_options_tokens():
    model, tokenizer = gpt().eval(), ByteTokenizer()
    scores = option_scores(model, tokenizer, "Is it? ", ["yes", "no, it is not"])
    for option, score in zip(["yes", "no, it is not"], scores, strict=True):
        ids = [tokenizer.end, *tokenizer.encode("Is it? " + option)]
        with torch.no_grad():
            rows = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
        count = len(option)
        expected = sum(
            rows[position, ids[position + 1]].item() for position in range(len(ids) - 1 - count, len(ids) - 1)
        )
        assert score == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("normalize", "answer"), [(False, "cat"), (True, "another dog")])
def test_the_likeliest_option_is_the_answer_or_the_likeliest_by_byte(monkeypatch, tmp_path, normalize, answer):
    (tmp_path / "e.json").write_text(json.dumps([{"text": "a", "answer": "cat"}]))
    examples = read_examples(tmp_path / "e.json", ["cat", "another dog"])  # of the command line
    monkeypatch.setattr(prompting, "option_scores", lambda *given: [-3.0, -4.0])
    asked = Prompting(template="{text}: {answer}", normalize=normalize)
    assert asked.answers(None, None, examples) == [answer]


def test_the_beginning_of_a_long_prompt_is_left_out():
    model, tokenizer = gpt(16), ByteTokenizer()
    ending, options = "as long as fits ", ["ab", "cd"]
    long, short = (option_scores(model, tokenizer, "x" * 90 + end, options) for end in (ending, ending[:9] + "!" * 7))
    assert long != short  # what fits does matter
    assert long == option_scores(model, tokenizer, "y" * 90 + ending, options)
    with pytest.raises(UserError, match="positions"):
        option_scores(model, tokenizer, "", ["a" * 17])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "no example"),
        ("[3]", "example 1 is an integer"),
        ('[{"text": "a", "answer": "b"}]', "at least two options"),
        ('[{"text": "a", "options": ["c", "d"], "answer": "b"}]', "not among"),
    ],
)
def test_wrong_examples_end_in_one_line(tmp_path, content, said):
    (tmp_path / "examples.json").write_text(content)
    with pytest.raises(UserError, match=said):
        read_examples(tmp_path / "examples.json")


def test_wrong_templates_end_in_one_line():
    assert Prompting(template="{{answer}} {text} {answer}").write(EXAMPLES[1], "yes") == "{answer} question 1 yes"
    for template in ("{text} {answer} {answer}", "{text {answer}", "{answer!s}", "{text.nope} {answer}"):
        with pytest.raises(UserError, match="--template"):
            Prompting(template=template)
    for asked, said in (
        (Prompting(template="{question} {answer}"), "has no field 'question'"),
        (Prompting(shots=4), "3 other examples"),
    ):
        with pytest.raises(UserError, match=said):
            asked.prompt(EXAMPLES, 0)
