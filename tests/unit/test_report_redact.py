"""Secrets do not reach a file; what only looks like one stays readable."""

import pytest

from rankwatch.report import redact


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--token", "abc"], ["--token", "***"]),
        (["--hub-token=abc", "x"], ["--hub-token=***", "x"]),
        (["--api-key", "abc", "--lr", "1"], ["--api-key", "***", "--lr", "1"]),
        (["--apiKey=abc"], ["--apiKey=***"]),
        (["--password", "-Zk9!"], ["--password", "***"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["WANDB_API_KEY=abc", "train.py"], ["WANDB_API_KEY=***", "train.py"]),
        (["HF_TOKENS=abc"], ["HF_TOKENS=***"]),
        (["wandb.api_key=abc", "model.lr=1"], ["wandb.api_key=***", "model.lr=1"]),
        (["+trainer.auth_token=x"], ["+trainer.auth_token=***"]),
        (["--tracking", "https://bob:hunter2@host/x"], ["--tracking", "https://***@host/x"]),
        (["--note", "hf_abcdefghijklmnop1234"], ["--note", "***"]),
        (["--header", "Authorization: Bearer abcdefghij"], ["--header", "Authorization: Bearer ***"]),
    ],
)
def test_hidden(given, shown):
    assert redact.command(given) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokenizer", "gpt2"],
        ["--max-tokens", "128"],
        ["--tokens-per-batch=4096"],
        ["--keyframes", "7"],
        ["--monkey", "x"],
        ["tokenizer.path=/data/t.model"],
        ["--rdzv-endpoint=host:29500"],
        ["--url", "https://host:8080/x"],
        ["a=b=c"],
        [""],
    ],
)
def test_kept(arguments):
    assert redact.command(arguments) == arguments


def test_the_number_of_arguments_stays():
    assert redact.command(["--token"]) == ["--token"]
    assert redact.command(["--token", "a", "b"]) == ["--token", "***", "b"]


def test_environment_names_hide_their_values():
    given = {"HF_TOKEN": "a", "AWS_SECRET_ACCESS_KEY": "b", "DB_PASSWORD": "c", "EMPTY_TOKEN": "", "TORCH_FR_BUFFER_SIZE": "2000", "PROXY": "http://u:p@h:1"}
    assert redact.environment(given) == {
        "HF_TOKEN": "***",
        "AWS_SECRET_ACCESS_KEY": "***",
        "DB_PASSWORD": "***",
        "EMPTY_TOKEN": "",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "PROXY": "http://***@h:1",
    }
