"""Secrets do not reach a file; what only looks like one stays readable."""

import pytest

from rankwatch import redact


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--token", "abc"], ["--token", "***"]),
        (["--hub-token=abc", "x"], ["--hub-token=***", "x"]),
        (["--api-key", "abc", "--lr", "1"], ["--api-key", "***", "--lr", "1"]),
        (["--apiKey=abc"], ["--apiKey=***"]),
        (["--password", "-Zk9!"], ["--password", "***"]),
        (["--token", "-abc123", "x"], ["--token", "***", "x"]),
        (["--use-token", "-password", "x", "y"], ["--use-token", "***", "***", "y"]),
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
        ["--token-file", "/etc/rankwatch/token"],
        ["--ssl-key-path=/etc/key.pem", "--credentials_dir", "/etc/c"],
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


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("login failed: password=hunter2, retry", "login failed: password=***, retry"),
        ("token='a b' x", "token='***' x"),
        ('{"api_key": "abc", "lr": 1}', '{"api_key": "***", "lr": 1}'),
        ("Authorization: Bearer abcdefghij", "Authorization: *** ***"),
        ("run --hub-token abc now", "run --hub-token *** now"),
        ("https://bob:hunter2@host/x?access_token=abc&y=1", "https://***@host/x?access_token=***&y=1"),
    ],
)
def test_hidden_in_text(given, shown):
    assert redact.text(given) == shown


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'token'",
        "max_tokens=512 token=7",
        "token = get_token(name)",
        "f'token={token}'",
        "missing key: layers.0.weight",
        "tokenizer: gpt2",
        "the password is wrong",
    ],
)
def test_kept_in_text(text):
    assert redact.text(text) == text


def test_a_long_word_takes_no_time():
    assert redact.text("a-" * 100_000).startswith("a-a-")


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
