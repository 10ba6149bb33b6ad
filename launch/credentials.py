"""Secrets in lines of shell and in environment variables, by their names, places and forms."""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Iterator

from trainer.addresses import REFERENCE, credential_in

_NAME = re.compile(
    r"(^|_|-)(API_?KEY|KEY|AUTH|TOKEN|SECRET|PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|CREDENTIALS?|"
    r"ACCESS_KEY_ID)($|_|-)|(API_?KEY|TOKEN|SECRET|PASSWD|PASSWORD|PASSPHRASE|_PWD)$",
    re.IGNORECASE,
)
_HARMLESS_NAME = re.compile(
    r"(^|_|-)(FILE|PATH|DIR|DISABLE|STDIN|ENV|NAME|TYPE|SIZE|COUNT|LENGTH|MODE|METHOD|IMPLICIT|"
    r"(PAD|MASK|EOS|BOS|SEP|CLS|UNK|STOP|MAX|NUM|NEW|SPECIAL)_TOKEN)(_|-|$)|"
    r"TOKENIZERS|^(OLD)?PWD$|^GOOGLE_APPLICATION_CREDENTIALS$",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(.*_)?(api_?key|token|secret|secret_key|password|passwd|passphrase)", re.IGNORECASE
)
_PLAIN = re.compile(r"[~.]*/\S*|\d{1,3}|true|false|yes|no|on|off|none|null|auto", re.IGNORECASE)
# A shell's references, and placeholders as <TOKEN>: the value comes from elsewhere.
_REFERENCE = re.compile(
    r"\$\w+|\$\{[^}]*\}|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|<\(?[\w./~ -]+\)?>?"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w-]*)\s*[+]?=(.*)", re.DOTALL)
# Options whose value is a secret in some commands only.
_OPTIONS = {
    "curl": ("-u", "--user", "-U", "--proxy-user", "--oauth2-bearer", "-b", "--cookie"),
    "sshpass": ("-p",),
    "mysql": ("-p",),
    "mysqldump": ("-p",),
    "skopeo": ("--creds", "--src-creds", "--dest-creds"),
    "openssl": ("-k", "-K", "-pass", "-passin", "-passout"),
}
_WITH_USER = ("-u", "--user", "-U", "--proxy-user")  # USER:PASSWORD; a user alone is no secret
_HEADER = re.compile(
    r"((?:proxy-)?authorization|cookie|private-token|[\w-]*(?:api-?key|token|secret))\s*[:=]\s*"
    r"((?:bearer|basic|token|digest)\s+)?([^\s\"']+)",
    re.IGNORECASE,
)
# A line of a netrc file, `aws configure set NAME WORD`, `wandb login WORD`, JSON and YAML.
_SPOKEN = re.compile(
    r"""machine\s.*\b(password)\s+([^\s"'|;&]+)"""
    r"|configure\s+set\s+\S*(aws_secret_access_key|aws_session_token)\s+([^\s|;&]+)"
    r"|(wandb\s+login)(?:\s+--relogin)?\s+([^\s|;&-][^\s|;&]*)"
    r"""|(wandb\.login)\([^)]*?["']([^"']+)["']"""
    r"""|(?<![\w-])(password|passwd|aws_secret_access_key|api_key|_authToken)["']?\s*[:=]\s*["']?"""
    r"""([^\s"'|;&]+)""",
    re.IGNORECASE,
)
# The forms of keys that services issue.
_FORM = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|hf_[A-Za-z0-9]{20,}"
    r"|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|sk_(?:live|test)_\w{16,}"
    r"|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|ya29\.[\w.-]{20,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{16,}"
    r"|wandb_v\d_\w{20,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_WANDB_KEY = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")  # as of a commit
_BASE64 = re.compile(r"(?<![\w+/=-])[A-Za-z0-9+/]{16,}={0,2}(?![\w+/=])")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret, rather than a path to one, or a switch."""
    if not _NAME.search(name) or _HARMLESS_NAME.search(name):
        return False
    return _is_secret_value(value)


def has_key(value: str) -> bool:
    """Whether a text has a key of a known form in it, whatever its name."""
    return bool(_FORM.search(value))


def secret_in(line: str) -> str | None:
    """Names the holder of the first secret in a line of shell; None if there is none."""
    line = _REFERENCE.sub(REFERENCE, line)
    if credential := credential_in(line):
        return f"the URL, {credential},"
    if has_key(line) or ("wandb" in line.lower() and _WANDB_KEY.search(line)):
        return "a key"
    for word in _BASE64.findall(line):
        if holder := _decoded_secret(word):
            return f"{holder} in base64"
    for match in (*_HEADER.finditer(line), *_SPOKEN.finditer(line)):
        given = [group for group in match.groups() if group]  # the name first, the value last
        if _is_secret_value(given[-1]):
            return f"the value of {given[0]}"
    return _given_in(line)


def _decoded_secret(word: str) -> str | None:
    try:
        text = base64.b64decode(word + "=" * (-len(word) % 4), validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return None
    text = text.strip()
    if not text.isprintable():
        return None
    return secret_in(text) or (
        "a user and a password" if re.fullmatch(r"\w+:\S{4,}", text) else None
    )


def _given_in(line: str) -> str | None:
    """The variable or option of a line whose literal value is a secret."""
    for words in _commands(line):
        command = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
        options = _OPTIONS.get(command.rpartition("/")[2], ())
        if "login" in words:  # docker login, and many others
            options = (*options, "-p")
        for word, following in zip(words, [*words[1:], ""], strict=False):
            if match := _ASSIGNMENT.fullmatch(word):
                if is_secret(*match.groups()):
                    return f"the value of {match[1]}"
            elif option := _option_with_secret(word, following, options):
                return f"the value of {option}"
    return None


def _commands(line: str) -> Iterator[list[str]]:
    """The words of each command in a line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set(";&|()\n"):
                yield words
                words = []
            else:
                words.append(word)
    except ValueError:  # a quotation that another line closes
        words += line.replace('"', " ").replace("'", " ").split()
    yield words


def _option_with_secret(word: str, following: str, options: tuple[str, ...]) -> str | None:
    """The option that gives a secret, as in `--token=x`, `--token x`, `-u me:x` and `-px`.

    Args:
        word: maybe an option.
        following: the next word.
        options: of this command, which others use for something else.
    """
    option, equals, value = word.partition("=")
    if option not in options:
        short = next((each for each in options if len(each) == 2 and word.startswith(each)), "")
        if short and not word.startswith("--"):
            option, equals, value = short, "=", word.removeprefix(short)
        else:
            name = option.lstrip("-").replace("-", "_")
            if name == option or not _OPTION.fullmatch(name) or _HARMLESS_NAME.search(name):
                return None
    value = value if equals else following
    if value.startswith("-"):  # the next option
        return None
    if option in _WITH_USER:
        value = value.partition(":")[2]
    return option if _is_secret_value(value) else None


def _is_secret_value(value: str) -> bool:
    """Whether a value is written out, rather than read from elsewhere, and no path or switch."""
    literal = value.replace(REFERENCE, "").strip("\"'{}<>[]:,; ")
    return bool(literal) and not _PLAIN.fullmatch(literal)
