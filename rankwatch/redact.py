"""Takes secrets out of command lines, environments and texts before they reach a file, a page or a line.

By name only: a value is hidden where the name of its argument or variable says that it is a secret, or where it has the form of a
well-known token. What this cannot see: a secret without a name, and one inside a file that the command names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

HIDDEN = "***"
_SECRET_WORDS = frozenset(
    ("token", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey", "authorization", "bearer", "key")
)
_PLACES = frozenset(("file", "path", "dir"))  # where the secret lies is none: whoever looks for it needs the path
_ENV_NEEDLES = ("TOKEN", "SECRET", "PASSW", "PASSPHRASE", "CREDENTIAL", "KEY")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USERINFO = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)")
_KNOWN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16})\b")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_NAMED = re.compile(
    r"""(?ix)
    (?P<name> (?<![A-Za-z]) [\w.-]{0,40}?
        (?: token | secret | passw(?:or)?d | passphrase | (?<![a-z])pwd | credentials? | authorization
          | (?: api | access | private | auth | account | hub | signing | encryption | storage | service | shared )[_-]?key ) ["']? )
    (?P<between> \s*[=:]\s* | (?<=[a-z]) [ ]+ )
    (?P<value> "[^"\n]*" | '[^'\n]*' | [^\s,;&'")\]}]+ )
    """
)
_CODE = re.compile(r"[A-Za-z_][\w.]*[(\[].*|\{.*|\W+|None|True|False")


def is_secret_name(name: str) -> bool:
    """Whether an argument's name says secret: `--hub-token`, `apiKey`, `WANDB_API_KEY`; not `--tokenizer`, `--max-tokens`, `--token-file`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if words and words[-1] in _PLACES:
        return False
    if any(word in _SECRET_WORDS - {"key"} for word in words):
        return True
    return bool(words) and words[-1] == "key"


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable's name says secret. Wider than for arguments: a value too many costs nothing here."""
    return any(needle in name.upper() for needle in _ENV_NEEDLES)


def value(text: str) -> str:
    """`text` without passwords in URLs and without what has the form of a well-known token."""
    return _BEARER.sub(rf"\1 {HIDDEN}", _KNOWN.sub(HIDDEN, _USERINFO.sub(HIDDEN, text)))


def text(text: str) -> str:
    """Free text - an exception, a traceback, the end of a log - without the values that stand behind a secret's name: `password=***`."""

    def hide(match: re.Match[str]) -> str:
        named = match["between"].strip() or match["name"].startswith("-")
        number = match["value"].isdigit() and "token" in match["name"].lower()  # token=512 counts tokens
        if not named or number or _CODE.fullmatch(match["value"]):
            return match[0]
        quote = match["value"][0] if match["value"][0] in "\"'" else ""
        return f"{match['name']}{match['between']}{quote}{HIDDEN}{quote}"

    return _NAMED.sub(hide, value(text))


def command(arguments: Iterable[str]) -> list[str]:
    """The command line with secrets as `***`; the number and the order of the arguments stay."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and not (argument.startswith("--") and is_flag(argument)):
            shown.append(HIDDEN)  # a single dash may begin a value; a flag that is hidden with it harms nobody
            hide_next = is_flag(argument) and is_secret_name(argument)
            continue
        hide_next = False
        name, equals, given = argument.partition("=")
        looks_named = bool(re.fullmatch(r"-{0,2}[A-Za-z_+][\w.\-+/@]*", name))
        if equals and looks_named and (is_secret_name(name) or (name.isupper() and is_secret_variable(name))):
            shown.append(f"{name}={HIDDEN}" if given else argument)
            continue
        hide_next = not equals and argument.startswith("-") and is_flag(argument) and is_secret_name(argument)
        shown.append(value(argument))
    return shown


def is_flag(argument: str) -> bool:
    """Whether an argument is an option rather than a value: `-x`, `--token`."""
    return bool(re.fullmatch(r"--?[A-Za-z][\w.\-]*(=.*)?", argument, re.DOTALL))


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with secrets as `***`."""
    return {name: HIDDEN if is_secret_variable(name) and text else value(text) for name, text in variables.items()}
