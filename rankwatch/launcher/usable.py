"""Whether what the options name is there on this machine, before a job depends on it: the token, the list of nodes, the incident command, addresses."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rankwatch.config import COMMAND_LINE, ConfigError, Options, place

_PLAIN_WORD = re.compile(r"[\w./+@%:-]+")
_ASK_S = 5.0
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Problem:
    """One option that will not do what it says. text: the checked cause and the next step; lost: what there is not because of it."""

    option: str
    origin: str
    text: str
    lost: str
    refused: bool = True  # False: a run does with less, and says so itself

    def __str__(self) -> str:
        return f"{place(self.option, self.origin)}: {self.text}"


def problems(options: Options) -> Iterator[Problem]:
    """What is wrong, the gravest first."""
    from rankwatch.serve.token import read_token

    if options.token_file:
        try:
            read_token(options.token_file)
        except ValueError as error:
            yield Problem("token-file", _origin(options, "token_file"), str(error), "the status page and /metrics: nothing is served without the token")
    if options.tls_cert:
        from rankwatch.serve import tls

        try:
            tls.load(options.tls_cert, options.tls_key, options.tls_client_ca)
        except ValueError as error:
            yield Problem("tls-cert", _origin(options, "tls_cert"), str(error), "the status page and /metrics: nothing is served in plain text instead")
    elif lonely := "tls-client-ca" if options.tls_client_ca else "tls-key" if options.tls_key else "":
        text = "it needs --tls-cert FILE: without the server's own certificate there is no TLS"
        yield Problem(lonely, _origin(options, lonely.replace("-", "_")), text, "the status page and /metrics: nothing is served in plain text instead")
    if options.sd_dir and options.listen == "off":
        text = "with --listen off there is nothing to scrape; give --listen HOST:PORT, or --textfile-dir in its place"
        yield Problem("sd-dir", _origin(options, "sd_dir"), text, "the file for Prometheus", refused=False)
    if options.archive_dir and not _is_folder(options.archive_dir):
        text = f"{options.archive_dir} is no folder here; make it, mount it, or correct the path"
        yield Problem("archive-dir", _origin(options, "archive_dir"), text, "every page that is to outlive the launcher; links lead to the run directory")
    if options.peers:
        from rankwatch.launcher.listed import read

        lost = "the list: the launchers look for each other in torchrun's store instead"
        try:
            read(options.peers)
        except ValueError as error:
            yield Problem("peers", _origin(options, "peers"), str(error), lost)
        else:
            if not options.token_file:
                text = "it needs --token-file FILE, with the same text on every node: without a store nothing else gives the launchers a secret"
                yield Problem("peers", _origin(options, "peers"), f"{text}; make one, such as: openssl rand -hex 16 > FILE", lost)
    if options.alertmanager_credentials:
        from rankwatch.notify.post import credentials

        try:
            credentials(options.alertmanager_credentials)
        except ValueError as error:
            origin = _origin(options, "alertmanager_credentials")
            yield Problem("alertmanager-credentials", origin, str(error), "every alert that the launcher posts itself")
    if why := _missing_program(options.on_incident):
        yield Problem("on-incident", _origin(options, "on_incident"), why, "every call of the command: nobody is paged")


def settled(options: Options) -> Options:
    """The options for a job. ConfigError for a mistake of the command line; one of a file or a variable is a warning, and no page is served unguarded."""
    warnings = list(options.warnings)
    for problem in problems(options):
        if not problem.refused:
            continue  # the server says it
        if problem.origin == COMMAND_LINE:
            raise ConfigError(str(problem))
        warnings.append(f"{problem}; lost until then: {problem.lost}")
        if problem.option in ("token-file", "tls-cert", "tls-key", "tls-client-ca"):
            options = replace(options, listen="off", origins={**options.origins, "listen": problem.origin})
        if problem.option == "peers":
            options = replace(options, peers="")
    return replace(options, warnings=tuple(warnings))


def _is_folder(path: str) -> bool:
    """A mount that does not answer in time counts as one: it delays nothing later either."""
    from rankwatch.launcher.aside import Aside

    look = Aside("rankwatch-usable").call(lambda: os.path.isdir(path), _LOOK_S)
    return bool(look.value) if look.done else True


def _origin(options: Options, field: str) -> str:
    return options.origins.get(field, COMMAND_LINE)


def _missing_program(command: str) -> str:
    """Why the shell will not find the first word of `command`; "" where it will, or where only the shell can tell."""
    try:
        word = next(iter(shlex.split(command)), "")
    except ValueError as error:
        return f"the shell cannot read {command!r} ({error}); correct the quotes"
    if not _PLAIN_WORD.fullmatch(word):
        return ""
    if "/" not in word:
        return "" if shutil.which(word) or _shell_knows(word) else f"there is no command {word!r} here; give its path, or install it"
    if not os.path.exists(word):
        return f"{word} does not exist; correct the path"
    if os.path.isdir(word) or not os.access(word, os.X_OK):
        return f"{word} is not executable; chmod +x {word}, or name its interpreter"
    return ""


def _shell_knows(word: str) -> bool:
    """Whether it is a built-in or a keyword. Where that cannot be asked, the word is trusted."""
    try:
        asked = subprocess.run(["/bin/sh", "-c", 'command -v -- "$1"', "sh", word], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return asked.returncode == 0
