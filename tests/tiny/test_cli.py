"""The command line: one run each in this process, errors without a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import speculon as speculon_package
from speculon import LLM, SamplingParams, __version__
from speculon.cli import app
from speculon.cli.options import NO_FLAG, engine_settings, extra_of, pick, vllm_alias
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import InvalidParameter
from speculon.measure.bench import corpus
from speculon.speculation.proposers.registry import registered
from tests.tiny.folders import make_folder, make_library

PROMPT = "def add(left, right):\n"
GREEDY = ["--temperature", "0", "--max-tokens", "24"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), speculation={"policy": "fixed"})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("cli") / "library")


@pytest.fixture(autouse=True)
def elsewhere(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no speculon.toml of whoever runs the tests
    monkeypatch.setattr(corpus, "stdlib_root", lambda: library)


def speculon(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(speculon_package.__file__ or "").parents[1])}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=env)


WITHOUT_TORCH = (
    "import sys; from speculon.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
)


def test_it_starts_without_torch_and_prints_its_version() -> None:
    done = python("-c", WITHOUT_TORCH, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"speculon {__version__}\nFalse\n", "")


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["chat"]], ids=["generate", "chat"])
def test_a_missing_model_is_an_error_before_torch_is_imported(command: list[str]) -> None:
    done = python("-c", WITHOUT_TORCH, *command, "--model", "/no/such/model")
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.splitlines() == ["ModelNotFound: /no/such/model: no such folder"]


def test_every_field_has_a_flag_and_no_default_of_its_own() -> None:
    options = {option.name: option for option in get_command(app).commands["generate"].params}  # type: ignore[attr-defined]
    for model in (SamplingParams, SpeculationConfig, EngineConfig):
        for name, field in model.model_fields.items():
            if name not in NO_FLAG:
                flag = extra_of(field).get("flag", "--" + name.replace("_", "-"))
                assert flag in options[name].opts and not options[name].default
                assert (field.description or "") in options[name].help
    assert "--max-tokens" in speculon("generate", "--help").stdout
    assert engine_settings({}) == pick(SamplingParams, {}) == {}


def test_vllms_form_of_the_speculation_options() -> None:
    text = '{"method": "draft_model", "model": "some/draft", "num_speculative_tokens": 5}'
    assert vllm_alias(text) == {"method": "draft_model", "draft": "some/draft", "num_speculative_tokens": 5}
    suffix = (
        '{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.2}'
    )
    assert SpeculationConfig(**vllm_alias(suffix)).suffix_min_probability == 0.2
    assert vllm_alias('{"model": "[ngram]", "prompt_lookup_max": 4}') == {
        "method": "ngram",
        "prompt_lookup_max": 4,
    }
    both = engine_settings({"num_speculative_tokens": "2"}, text)
    assert both["speculation"]["num_speculative_tokens"] == 2
    with pytest.raises(InvalidParameter, match="must be JSON"):
        vllm_alias("{")


def test_values_that_are_tables() -> None:
    assert pick(SamplingParams, {"logit_bias": '{"5": 1.5}', "top_k": "3", "stop": ["a", "b"]}) == {
        "logit_bias": {"5": 1.5},
        "top_k": 3,
        "stop": ["a", "b"],
    }
    assert pick(SpeculationConfig, {"draft": '{"eagle3": "x"}'}) == {"draft": {"eagle3": "x"}}
    assert pick(SpeculationConfig, {"draft": "a/folder"}) == {"draft": "a/folder"}


def test_one_text_is_streamed_and_then_explained(folder: Path, llm: LLM) -> None:
    done = speculon(
        "generate", "--model", str(folder), "--method", "ngram", "--policy", "fixed", "-p", PROMPT, *GREEDY
    )
    expected = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24))[0]
    assert (done.exit_code, done.stdout) == (0, expected.text + "\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ngram: 24 tokens in ")


def test_json_is_one_object_per_prompt_and_nothing_else(folder: Path, llm: LLM) -> None:
    prompts = ["-p", PROMPT, "-p", "class Stack:"]
    flags = ["--max-tokens", "12", "--seed", "5", "--n", "2", "--logprobs", "1", "--json"]
    runs = [
        speculon("generate", "--model", str(folder), "--method", method, *prompts, *flags)
        for method in ("off", "ngram")
    ]
    assert [(run.exit_code, run.stderr) for run in runs] == [(0, ""), (0, "")]
    plain, ngram = ([json.loads(line) for line in run.stdout.splitlines()] for run in runs)
    assert [one["prompt"] for one in plain] == [PROMPT, "class Stack:"]
    assert [len(one["outputs"]) for one in plain] == [2, 2]
    assert texts(plain) == texts(ngram)
    assert all(
        text["reasons"] == {"off_config": 11} and text["speculation"]["rounds"] == 0
        for one in plain
        for text in one["outputs"]
    )
    assert all(len(text["logprobs"]) == len(text["token_ids"]) for one in ngram for text in one["outputs"])


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [text["text"] for one in answers for text in one["outputs"]]


def test_a_file_and_stdin_are_taken_as_they_are(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    flags = ["generate", "--model", str(folder), *GREEDY, "--json"]
    from_file = speculon(*flags, "--prompt-file", "prompt.txt")
    from_stdin = speculon(*flags, stdin=PROMPT)
    one, other = json.loads(from_file.stdout), json.loads(from_stdin.stdout)
    assert one["prompt"] == other["prompt"] == PROMPT
    assert texts([one]) == texts([other])


def test_a_prediction_comes_from_a_file(folder: Path, llm: LLM, tmp_path: Path) -> None:
    expected = llm.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=24), speculation={"method": "off"}
    )[0]
    (tmp_path / "known.txt").write_text(expected.text)
    flags = ["generate", "--model", str(folder), "-p", PROMPT, *GREEDY, "--prediction-file", "known.txt"]
    (one,) = json.loads(speculon(*flags, "--json").stdout)["outputs"]
    assert one["text"] == expected.text and "prediction" in one["speculation"]["by_source"]
    assert speculon(*flags).stdout == expected.text + "\n"


def test_chat_goes_through_the_template(folder: Path, llm: LLM) -> None:
    done = speculon(
        "generate", "--model", str(folder), "--system", "Be brief.", "-p", "Hello", *GREEDY, "--json"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert json.loads(done.stdout)["prompt_token_ids"] == llm.tokenizer.apply_chat(messages)


def test_many_texts_are_shown_under_their_prompts(folder: Path) -> None:
    done = speculon("generate", "--model", str(folder), "-p", PROMPT, "-p", "class", *GREEDY)
    assert [line for line in done.stdout.splitlines() if line.startswith("==>")] == [
        "==> def add(left, right):",
        "==> class",
    ]
    assert done.stderr.count("per call") + done.stderr.count("no speculation") == 2


REFUSED = [
    pytest.param(["-p", "x", "--temperature", "-1"], "InvalidParameter", "temperature = -1.0", id="a value"),
    pytest.param(
        ["-p", "x", "--logit-bias", "[1]"], "InvalidParameter", "must be a JSON object", id="no object"
    ),
    pytest.param(["-p", "x", "--block-size", "0"], "ConfigError", "block_size = 0", id="a setting"),
    pytest.param(["-p", "x", "--method", "zzz"], "UnknownMethod", "must be one of", id="a method"),
    pytest.param(["-p", "x", "--speculative-config", '{"k": 1}'], "ConfigError", "k", id="an unknown key"),
    pytest.param(["--prompt-file", "none.txt"], "InvalidParameter", "none.txt", id="no file"),
    pytest.param(
        ["-p", "x", "--prediction-file", "none.txt"],
        "InvalidParameter",
        "prediction-file = 'none.txt'",
        id="nor this",
    ),
]


@pytest.mark.parametrize(("arguments", "error_type", "words"), REFUSED)
def test_an_error_is_one_line_and_exit_code_2(arguments: list[str], error_type: str, words: str) -> None:
    plain, machine = speculon("generate", *arguments), speculon("generate", *arguments, "--json")
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert (
        plain.stderr.startswith(error_type + ": ") and words in plain.stderr and plain.stderr.count("\n") == 1
    )
    assert (machine.exit_code, machine.stderr) == (2, "")
    error = json.loads(machine.stdout)["error"]
    assert error["type"] == error_type and words in error["message"]


def test_inspect_shows_what_is_supported(folder: Path) -> None:
    done = speculon("inspect", str(folder), "--json")
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["supported"], facts["num_layers"], len(facts["layers"])) == (0, True, 2, 2)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 8 * 2 * 4  # layers, heads, width, K and V, fp32
    everything = speculon("inspect", str(folder), "--all").stdout
    assert all(name in everything for name in facts["capabilities"] if name.startswith("limits."))


def test_inspect_says_in_25_lines_what_the_model_is_and_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered.clear()  # methods of other tests
    monkeypatch.setenv("COLUMNS", "100")
    shown = speculon("inspect", "--model", str(folder)).stdout
    lines = [line.rstrip() for line in shown.splitlines()]
    assert len(lines) <= 25 and max(map(len, lines)) <= 100 and "…" not in shown
    words = " ".join(shown.split())
    for part in (
        ": LlamaForCausalLM, 2 layers, ",
        "supported yes: equal to its stock forward",
        "takes text, and chats with tools (tool calls in a generic form, because its chat template has no "
        "known one); no images (a text model); up to 1,024 tokens",
        "runs on cpu in float32; all 2 layers are fused and not compiled (off: in float32 a program rounds "
        "otherwise than the loop, as --compile now allows)",
        " tokens of 256 bytes",
        "methods by default auto, which asks suffix ",
        "ngram, suffix: looks up drafts in earlier tokens, without a model",
        "dflash, draft_model, eagle3, gemma4_assistant, pard: no drafter is configured (set --draft)",
        "mtp: the checkpoint has no MTP layers",
    ):
        assert part in words, (part, words)


def test_inspect_shows_what_is_refused_and_why(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "model"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    done = speculon("inspect", str(broken), "--json")
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["supported"], facts["error"]["type"]) == (2, False, "MissingWeights")
    assert facts["architecture"] == "LlamaForCausalLM"
    assert json.loads(speculon("inspect", str(broken), "--no-load", "--json").stdout)["num_layers"] == 3
    assert speculon("inspect", str(tmp_path / "none")).exit_code == 2


def test_inspect_shows_the_memory_of_a_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "speculon.engine.build.warm_up",
        lambda engine: pytest.fail("no round runs, so that none needs a warm-up"),
    )
    facts = json.loads(speculon("inspect", str(folder), "--draft", str(folder), "--json").stdout)
    memory = facts["memory"]
    assert memory["fits"] and memory["drafters"] == 4 * facts["num_parameters"]
    assert memory["measured"] > memory["drafters"]
    flags = ("inspect", str(folder), "--draft", str(folder), "--memory-limit-gb", "0.001")
    assert (
        "beyond the limit of 1.0 MiB, which memory_policy allows"
        in speculon(*flags, "--memory-policy", "allow").stdout
    )
    refused = speculon(*flags, "--memory-policy", "fail")
    assert refused.exit_code == 2 and "beyond the limit of 1.0 MiB, so the model is refused" in refused.stdout
    assert "MemoryExceeded" in speculon(*flags, "--memory-policy", "fail", "--json").stdout
