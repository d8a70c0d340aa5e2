"""Evaluation: our model class gives the harness's own texts, and its tasks score them."""

from __future__ import annotations

import json
from dataclasses import replace

import lm_eval.tasks
import pytest
from eval_data import write_data
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from tiny import TEMPLATE

from taper import LLM, DepthPolicy
from taper.errors import PolicyError, RequestError, TaperWarning
from taper.lab.evals import evaluate, load_tasks, summarise
from taper.lab.evals.harness import TaperLM, complete

CONTEXTS = ["Question: What is 2 + 3?\nAnswer:", "Two\n\nlines", "naïve café", "a", "Q: " + "word " * 12 + "\nA:"]
TAPERED = DepthPolicy.d3(6, 0.9, skip_order=[4, 1, 2])


@pytest.fixture(scope="module")
def llm(tiny_llama) -> LLM:
    return LLM(tiny_llama.folder, device="cpu", dtype="f32", context=256, threads=1, max_batch_size=3)


@pytest.fixture(scope="module")
def lm(llm) -> TaperLM:
    return TaperLM(llm, mode="full")


@pytest.fixture(scope="module")
def hf(tiny_llama) -> HFLM:
    """The harness's own class on the same model."""
    return HFLM(str(tiny_llama.folder), device="cpu", dtype="float32", max_length=256, batch_size=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def instances(gen_kwargs: dict, contexts=CONTEXTS) -> list[Instance]:
    asked = enumerate(contexts)
    return [Instance("generate_until", {}, (text, gen_kwargs), 0, metadata=("made up", i, 1)) for i, text in asked]


def texts(lm: LM, asked: list[Instance]) -> list[str]:
    return [whole(text) for text in lm.generate_until(asked, disable_tqdm=True)]


def whole(text: str) -> str:
    """A text without half a character at its end, which the harness's own class shows."""
    return text.rstrip("\ufffd")


# The model class


@pytest.mark.ci
def test_full_depth_gives_the_texts_of_the_harness_own_class(lm, hf):
    asked = instances({"until": ["\x00never"], "max_gen_toks": 40})
    expected = texts(hf, asked)
    assert texts(lm, asked) == expected
    assert len(set(expected)) == len(CONTEXTS)
    # Stop strings that do come: the two characters in the middle of each text.
    stops = [text[i : i + 2] for text in expected if text[(i := len(text) // 2) : i + 2].isascii()]
    assert stops
    asked = instances({"until": stops, "max_gen_toks": 40})
    shorter = texts(hf, asked)
    assert shorter != expected
    assert texts(lm, asked) == shorter


def test_examples_and_long_prompts_give_its_texts_too(lm, hf, data):
    task = load_tasks(["gsm8k"], data_dir=data).tasks[0]
    (request,) = task.problems([0])[0].requests
    assert request.args[0].count("Question:") == 6  # five examples
    long = "".join(request.args[0])
    asked = instances({"until": ["Question:"], "max_gen_toks": 16}, [long, f"{long}{long}"])
    with pytest.warns(TaperWarning, match="2 prompts were cut at the beginning"):
        written = texts(lm, asked)
    assert written == texts(hf, asked)


@pytest.mark.ci
def test_many_problems_get_the_strings_of_the_harness_own_class(llm, hf, tmp_path):
    data = write_data(tmp_path, problems=12)
    ours = evaluate(llm, load_tasks(["gsm8k"], fewshot=0, data_dir=data), ["full"], max_tokens=16)
    task = load_tasks(["gsm8k"], fewshot=0, data_dir=data).tasks[0]
    more = {"task_manager": lm_eval.tasks.TaskManager(include_defaults=False), "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(hf, tasks=[task._task], gen_kwargs={"max_gen_toks": 16}, **more)
    theirs = [one for one in results["samples"]["gsm8k"] if one["filter"] == "flexible-extract"]
    written = [whole(record.completions[0].text) for record in ours.records]
    assert written == [whole(one["resps"][0][0]) for one in theirs]
    assert [record.extracted["flexible-extract"] for record in ours.records] == [
        one["filtered_resps"][0] for one in theirs
    ]
    assert len(theirs) == 12
    assert len({one["resps"][0][0] for one in theirs}) >= 10


@pytest.mark.ci
def test_control_tokens_end_an_output_as_in_the_harness(lm, hf):
    contexts = ["27", "10", "59"]  # after which the model writes <|im_end|>, <|im_start|> and <|endoftext|>
    # A control token that is not the model's own stop token has no text, so it is found by its id.
    for until in ([], ["<|im_start|>"], ["<|endoftext|>"]):
        asked = instances({"until": until, "max_gen_toks": 48, "repetition_penalty": 1.3}, contexts)
        assert texts(lm, asked) == texts(hf, asked)


def test_a_prompt_has_one_bos(folder, llm):
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    pieces = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    pipeline["post_processor"] = {
        "type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": special
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(pipeline))
    names = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    ours = TaperLM(LLM(folder, device="cpu", context=64, threads=1, max_batch_size=1), mode="full")
    theirs = HFLM(str(folder), device="cpu", dtype="float32")
    for text in ("Hello", "<|endoftext|>Hello"):
        ids = ours.request(text, {"max_gen_toks": 4}, ours.policy, 0).prompt_ids
        assert list(ids) == theirs.tok_batch_encode([text])[0][0].tolist()
        assert list(ids).count(0) == 1


def test_chat_prompts_are_those_of_the_harness(lm, hf):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    assert lm.apply_chat_template(chat) == hf.apply_chat_template(chat)
    begun = [*chat, {"role": "assistant", "content": "The answer is"}]
    ours = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert ours == hf.apply_chat_template(begun, add_generation_prompt=False)


def test_the_requests_of_a_chain_follow_each_other_in_one_slot(lm, llm):
    requests = [
        [lm.request(f"{text} and more", {"max_gen_toks": 8}, policy, 0) for policy in (lm.policy, TAPERED)]
        for text in CONTEXTS
    ]
    ends = [(chain, output.policy) for chain, output in complete(llm, requests)]
    for chain in range(len(CONTEXTS)):
        assert [policy for number, policy in ends if number == chain] == [lm.policy, TAPERED]
    assert llm.engine.num_free_slots == 3


def test_sampling_repeats_by_seed_and_differs_by_repeat(lm, llm):
    (one,) = instances({"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.0, "top_p": 0.9}, ["Hi"])
    written = texts(lm, [one, one])
    assert written[0] != written[1]
    assert texts(lm, [one, one]) == written
    assert lm.request_seed(one, 0) != TaperLM(llm, mode="full", seed=1).request_seed(one, 0)


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"typical_p": 0.9}, "the task generates with typical_p, which is not supported"),
        ({"num_beams": 4}, "4 beams; only 1 is supported"),
        ({"do_sample": True}, "samples without a temperature"),
        ({"max_gen_toks": 256}, "up to 256 tokens, but the context holds 256"),
        ({"do_sample": True, "temperature": 1.0, "top_p": 7}, "top_p is 7"),
    ],
)
def test_options_that_cannot_be_followed_are_rejected(lm, gen_kwargs, message):
    with pytest.raises(RequestError, match=message):
        lm.generate_until(instances(gen_kwargs), disable_tqdm=True)


def test_log_likelihoods_are_rejected(lm):
    for method in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(RequestError, match="generate nothing, so there is no step"):
            method([])


@pytest.mark.ci
def test_the_harness_finds_the_class_by_name(tiny_llama, data, tmp_path):
    (tmp_path / "policy.json").write_text(TAPERED.to_json())
    arguments = {"model": str(tiny_llama.folder), "policy": str(tmp_path / "policy.json"), "dtype": "f32"}
    arguments |= {"context": 512, "threads": 1, "device": "cpu"}
    task = load_tasks(["gsm8k"], fewshot=0, data_dir=data).tasks[0]
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    more = {"task_manager": manager, "limit": 2, "gen_kwargs": {"max_gen_toks": 12}, "bootstrap_iters": 0}
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    results = lm_eval.simple_evaluate("taper", model_args, [task._task], batch_size=2, **more)
    written = [sample["resps"][0][0] for sample in results["samples"]["gsm8k"] if sample["filter"] == "strict-match"]
    with pytest.raises(RequestError, match="model_args has revision"):
        TaperLM(revision="main")
    llm = LLM(tiny_llama.folder, device="cpu", dtype="f32", context=512, threads=1)
    result = evaluate(llm, load_tasks(["gsm8k"], fewshot=0, data_dir=data), [TAPERED], limit=2, max_tokens=12)
    assert written == [record.completions[0].text for record in result.records]


# Tasks and scores


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("1,000 + 234 = 1,234\n#### 1,234", 1, 1),
        ("#### 1,234.", 1, 1),
        ("It costs $1,234", 0, 1),
        ("The answer is (1234).", 0, 1),
        ("It is 1234, not 1235", 0, 0),
        ("#### 1234 or so, about 7", 1, 0),
        ("-1234", 0, 0),
        ("#### -1234", 0, 0),
        ("I do not know.", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_finds_the_answer_as_the_harness_does(tmp_path, text, strict, flexible):
    row = json.dumps({"question": "How many?", "answer": "1200 + 34\n#### 1,234"}) + "\n"
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(row)
    task = load_tasks(["gsm8k"], fewshot=0, data_dir=tmp_path).tasks[0]
    scores, _ = task.score(task.problems([0])[0], [[text]])
    assert scores == {"strict-match": {"exact_match": strict}, "flexible-extract": {"exact_match": flexible}}


@pytest.mark.parametrize(
    ("text", "fewshot", "flexible", "strict"),
    [
        ("So the answer is False.", 1, 1, 1),
        ("So the answer is False.\nQ: And now?", 1, 1, 1),
        ("The answer is False.", 0, 1, 1),
        ("So the answer is False", 0, 1, 0),  # the last character of the line is taken for the full stop
        ("So the answer is **False**.", 0, 1, 0),
        ("The answer is True. No, the answer is False.", 1, 1, 0),
        ("So the answer is True. No, the answer is False.", 0, 1, 0),
        ("So the answer is False.\nSo the answer is True.", 1, 0, 1),
        ("It is not True, so it is False", 0, 1, 0),
        ("the answer is false.", 0, 0, 1),
        ("Falsehood", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_bbh_finds_the_answer_as_the_harness_does(data, text, fewshot, flexible, strict):
    name = "boolean_expressions"
    by_filter = {}
    for task in load_tasks([f"bbh_cot_fewshot_{name}", f"bbh_cot_zeroshot_{name}"], data_dir=data).tasks:
        problem = task.problems([0])[0]
        assert problem.requests[0].doc["target"] == "False"
        by_filter |= {name: scores["exact_match"] for name, scores in task.score(problem, [[text]])[0].items()}
    assert by_filter == {"get-answer": fewshot, "flexible-extract": flexible, "strict-match": strict}


class Scripted(LM):
    """Completes each problem by a function."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests):
        return [self.answer(request.doc) for request in requests]

    loglikelihood = loglikelihood_rolling = generate_until


def oracle(doc: dict) -> str:
    return doc["answer"] if "answer" in doc else f"So the answer is {doc['target']}."


@pytest.mark.ci
@pytest.mark.parametrize(("answer", "expected"), [(oracle, 1.0), (lambda doc: "So the answer is 7.", 0.0)])
def test_an_oracle_scores_1_and_a_wrong_model_0(data, answer, expected):
    selection = load_tasks(["gsm8k", "bbh_cot_fewshot", "bbh_cot_zeroshot_word_sorting"], data_dir=data)
    assert [task.name for task in selection.tasks] == [
        "gsm8k",
        "bbh_cot_fewshot_boolean_expressions",
        "bbh_cot_fewshot_word_sorting",
        "bbh_cot_zeroshot_word_sorting",
    ]
    assert "bbh_cot_fewshot_snarks" in selection.missing
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    results = lm_eval.simple_evaluate(
        Scripted(answer), tasks=[task._task for task in selection.tasks], task_manager=manager, bootstrap_iters=0
    )
    for task in selection.tasks:
        for problem in task.problems(range(task.num_problems)).values():
            scores, _ = task.score(problem, [[answer(problem.requests[0].doc)]])
            assert scores[task.filters[0]]["exact_match"] == expected
        assert results["results"][task.name][f"exact_match,{task.filters[0]}"] == expected


def test_local_data_changes_nothing_but_where_it_comes_from(data, capfd):
    task = load_tasks(["bbh_cot_fewshot_boolean_expressions"], data_dir=data).tasks[0]
    context, options = task.problems([0])[0].requests[0].args
    assert context.startswith("Evaluate the result of a random Boolean expression.")
    assert context.count("Let's think step by step") == 4
    assert context.endswith("Q: not ( True ) is\nA: Let's think step by step.\n")
    assert (task.version, task.num_fewshot, task.filters) == ("4.0", 3, ["get-answer"])
    assert options["until"] == ["</s>", "Q", "\n\n"]
    assert capfd.readouterr() == ("", "")


def test_a_problem_has_the_same_examples_whichever_others_are_asked(data):
    task = load_tasks(["gsm8k"], fewshot=2, data_dir=data).tasks[0]
    every = task.problems(range(6))
    assert len({problem.prompt_hash for problem in every.values()}) == 6
    some = task.problems([4, 2])
    assert all(some[index].prompt_hash == every[index].prompt_hash for index in (2, 4))


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k'\non the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(RequestError, match="gsm8k cannot be loaded: Couldn't reach 'openai/gsm8k' on the Hub") as error:
        load_tasks(["gsm8k"])
    assert "data_dir" in str(error.value)


# Whole evaluations


def test_records_do_not_depend_on_the_batch(llm, tiny_llama, data, tmp_path):
    selection = load_tasks(["gsm8k"], fewshot=1, data_dir=data)
    one = LLM(tiny_llama.folder, device="cpu", dtype="f32", context=256, threads=1, max_batch_size=1)
    results = [evaluate(m, selection, ["full", TAPERED], limit=5, max_tokens=20) for m in (llm, one)]
    assert results[0].records == results[1].records
    assert len(results[0].records) == 10
    summary = summarise(results[0])
    timeless = [replace(summarise(result), problem_s=0.0).to_json() for result in results]
    assert timeless[0] == timeless[1]
    full, ours = summary.results[0].scores
    assert full.mean_depth == 6 > ours.mean_depth
    assert ours.against_full.problems == 5


def test_a_policy_of_the_same_name_is_rejected(llm, data):
    other = replace(TAPERED, name="mine"), replace(DepthPolicy.d3(6, 0.5, skip_order=[2]), name="mine")
    with pytest.raises(RequestError, match="two have the same name"):
        evaluate(llm, load_tasks(["gsm8k"], data_dir=data), other)
    with pytest.raises(PolicyError):
        evaluate(llm, load_tasks(["gsm8k"], data_dir=data), [DepthPolicy.full(5)])
