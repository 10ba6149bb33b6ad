"""Secrets in lines of shell and in environment variables, by their names, places and forms."""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Iterator

from samestep.addresses import credential_in
from samestep.addresses.parts import REFERENCE, SECRET_NAMES, SECRET_PARTS

# A signature lets others in only as part of an address.
_PARTS = "|".join(part for part in SECRET_PARTS if part != "signature")
_PARTS = _PARTS.replace("key", "_?key").replace("credential", "credentials?")
_STRONG = re.compile(rf"(^|_|-)({_PARTS}|pass|pwd)($|_|-)|({_PARTS}|_pwd)$", re.IGNORECASE)
# Names of secrets and of many other things, such as SORT_KEY and AUTH: the value decides.
_WEAK = re.compile(rf"(^|_|-)({'|'.join(sorted(SECRET_NAMES))})($|_|-)", re.IGNORECASE)
_WORDS = re.compile(
    r"(?:[A-Z]?[a-z]{1,20}|[A-Z]{1,20})(?:[ ./:_-]+(?:[A-Z]?[a-z]{1,20}|[A-Z]{1,20}))*"
)
_HARMLESS_NAME = re.compile(
    r"(^|_|-)(FILE|PATH|DIR|DISABLE|STDIN|ENV|NAME|TYPE|SIZE|COUNT|LENGTH|MODE|METHOD|IMPLICIT|"
    r"(PAD|MASK|EOS|BOS|SEP|CLS|UNK|STOP|MAX|NUM|NEW|SPECIAL)_TOKEN)(_|-|$)|"
    r"TOKENIZERS|^(OLD)?PWD$|^GOOGLE_APPLICATION_CREDENTIALS$|(?<!ACCESS)(_|^)KEY_ID$",
    re.IGNORECASE,
)
_OPTION = re.compile(rf"(.*_)?({_PARTS})(_key)?", re.IGNORECASE)
# Paths, names of files, openssl's sources of a password, switches, and patterns of sed or grep.
_PLAIN = re.compile(
    r"[~.]*/\S*|[\w.-]+\.(?:txt|json|ya?ml|pem|key|env|cfg|conf|ini|toml|csv|log|pub|crt)"
    r"|(?:file|env|fd):\S+|stdin|\d{1,3}|true|false|yes|no|on|off|none|null|auto"
    r"|.*(?:\.\*|\[\^|\\[(sSwW]).*",
    re.IGNORECASE,
)
# A variable's default, ${NAME:-VALUE}, whose value may be a secret.
_DEFAULT = r"\$\{(?P<name>\w+):?(?P<operator>[-=+])(?P<value>[^{}$`]*)\}"
# What a shell or a reader puts in its place comes from elsewhere: a variable's value, the output of
# a command, and a placeholder as <TOKEN>.
_EXPANSION = re.compile(
    rf"{_DEFAULT}|\$(?:\w+|[@*#?!$])|\$\{{[^{{}}$`]*\}}|[$<>]\((?P<command>(?:[^()]|\([^()]*\))*)\)"
    r"|`(?P<quoted>[^`]*)`|<(?P<words>[\w./~ -]+)>"
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
# USER:PASSWORD and NAME=VALUE; a user alone is no secret, nor is the name of a file of cookies.
_SEPARATORS = {
    **dict.fromkeys(("-u", "--user", "-U", "--proxy-user"), ":"),
    **dict.fromkeys(("-b", "--cookie"), "="),
}
# Commands whose `login` takes a password as -p.
_LOGINS = {"docker", "podman", "nerdctl", "buildah", "skopeo", "helm", "oras", "az", "oc"}
# An option that names a secret, which the command then looks up.
_LOOKED_UP = re.compile(r"--secret[= ]\S+")
_LOOKS_UP = re.compile(r"\b(?:gcloud|docker|podman|nerdctl|buildah)\s")
_HEADER = re.compile(
    r"((?:proxy-)?authorization|cookie|private-token|[\w-]{0,60}(?:api-?key|token|secret))"
    r"\s*[:=]\s*((?:bearer|basic|token|digest)\s+)?([^\s\"']+)",
    re.IGNORECASE,
)
# A line of a netrc file, words of aws, wandb, kubectl and docker, JSON and YAML.
_SPOKEN = re.compile(
    r"""machine\s.*\b(password)\s+([^\s"'|;&]+)"""
    r"|configure\s+set\s+\S*(aws_secret_access_key|aws_session_token)\s+([^\s|;&]+)"
    r"|(wandb\s+login)(?:\s+--relogin)?\s+([^\s|;&-][^\s|;&]*)"
    r"|(--from-literal)[=\s]\s*[^\s=]+=([^\s|;&]+)"
    r"""|(?=(?:echo|printf)\s+\S+\s*\|[^;&|]{0,200}(--password-stdin))\w+\s+["']?([^\s"'|;&]+)"""
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
    r"|sk-(?:(?:ant|proj|svcacct|admin|or|lf)-[\w-]{20,}|(?=\w{0,60}\d)\w{20,})"
    r"|sk_(?:live|test)_\w{16,}"
    r"|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|ya29\.[\w.-]{20,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{16,}"
    r"|wandb_v\d_\w{20,}|hvs\.[\w-]{20,}"
    r"|eyJ[\w-]{8,800}\.eyJ[\w-]{8,800}\.[\w-]*"
    r")|----[- ]BEGIN [A-Z\d ]*PRIVATE KEY"
)
# Other 40 hexadecimal digits are commits.
_WANDB_KEY = re.compile(
    r"wandb(?:[\s.]+login|[._]?(?:api[._]?)?key)\b[^\n;&|]{0,80}?"
    r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"
    r"|(?<![0-9a-f])[0-9a-f]{40}[\"']?\s*(?:\|\s*wandb\s+login|>>?\s*\S*wandb)",
    re.IGNORECASE,
)
_BASE64 = re.compile(r"(?<![\w+/=-])[A-Za-z0-9+/]{16,}={0,2}(?![\w+/=])")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret, rather than a path to one, or a switch."""
    if _HARMLESS_NAME.search(name):
        return False
    if not _STRONG.search(name) and (not _WEAK.search(name) or _WORDS.fullmatch(value)):
        return False
    return _is_secret_value(value)


def has_key(text: str) -> bool:
    """Whether a text has a key of a known form in it, whatever its name."""
    return bool(_FORM.search(text) or _WANDB_KEY.search(text))


def secret_in(line: str) -> str | None:
    """Names the holder of the first secret in a line of shell; None if there is none."""
    expanded, insides, defaults = _expand(line)
    if credential := credential_in(expanded):
        return f"the URL, {credential},"
    if has_key(line):
        return "a key"
    for name, value in defaults:
        if is_secret(name, value):
            return f"the value of {name}"
    return next(filter(None, map(secret_in, insides)), None) or _literal_in(expanded)


def _expand(line: str) -> tuple[str, list[str], list[tuple[str, str]]]:
    """Replaces the expressions that a shell expands, from the inside out.

    Returns:
        The line with defaults as `${NAME:-VALUE}` in place, and else `REFERENCE`; the commands in
        substitutions; names and values of the defaults.
    """
    insides: list[str] = []
    defaults: list[tuple[str, str]] = []
    done = "\0"  # unlike `REFERENCE`, it does not begin another reference with what follows

    def replacement(found: re.Match[str]) -> str:
        if found["operator"]:
            if found["operator"] != "+":
                defaults.append((found["name"], found["value"].replace(done, REFERENCE)))
            return found["value"] or done
        inside = found["command"] or found["quoted"] or found["words"] or ""
        insides.append(inside.replace(done, REFERENCE))
        return done

    count = 1
    while count:
        line, count = _EXPANSION.subn(replacement, line)
    return line.replace(done, REFERENCE), insides, defaults


def _literal_in(line: str) -> str | None:
    """As `secret_in`, of a line without references."""
    if _LOOKS_UP.search(line):
        line = _LOOKED_UP.sub("", line)
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
    """The variable or option of a line to which it gives a literal secret."""
    for words in _commands(line):
        command = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
        options = _OPTIONS.get(command.rpartition("/")[2], ())
        if "login" in words and _LOGINS.intersection(word.rpartition("/")[2] for word in words):
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
    if separator := _SEPARATORS.get(option):
        value = value.partition(separator)[2]
    return option if _is_secret_value(value) else None


def _is_secret_value(value: str) -> bool:
    """Whether a value is a literal, rather than read from elsewhere, and no path or switch."""
    literal = value.replace(REFERENCE, "").strip("\"'{}<>[]:,; ")
    return bool(literal) and not _PLAIN.fullmatch(literal)
