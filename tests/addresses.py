"""Addresses with a credential in them, in all forms that a user may write; and some without one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

SCHEMES = ("s3", "gs", "az", "http", "https", "hf", "file", "git+https")
HOSTS = ("host", "host:8080", "[::1]", "[2001:db8::1]:9000", "127.0.0.1:1", "b-1.example.com")
PATHS = (
    "",
    "/",
    "/a/b.jsonl",
    "/a(1).jsonl",
    "/[ab]/{x,y}/*.tar",
    "/a%20b%2F%3F.gz",
    "/a b/c d.csv",
    '/it\'s/"q"',
    "/v@1/x:y/z,w",
    "/date=2026/part?.parquet",
)
NAMES = (
    "sig",
    "X-Amz-Signature",
    "X-Goog-Signature",
    "X-Amz-Security-Token",
    "AWSAccessKeyId",
    "token",
    "access_token",
    "api_key",
    "key",
    "password",
    "AccessKeyId",
)
AROUND = ("{}", "cannot read {}: refused", "'{}'", "({}), twice", '{{"url": "{}"}}', "see <{}>.")


class Address(NamedTuple):
    """An address and the secret in it, which is a single word."""

    text: str
    secret: str


def with_credentials(count: int, seed: int = 0) -> Iterator[Address]:
    """Addresses with a random secret in the userinfo, the query or the fragment."""
    chance = random.Random(seed)
    for number in range(count):
        secret = f"S3CR{chance.randrange(10**12):012}T"
        scheme, path = chance.choice(SCHEMES), chance.choice(PATHS)
        host = chance.choice(HOSTS)
        if number % 2:
            yield Address(f"{scheme}://{_userinfo(chance, secret)}@{host}{path}", secret)
        else:
            yield Address(f"{scheme}://{host}{path}{_query(chance, secret)}", secret)


def _userinfo(chance: random.Random, secret: str) -> str:
    user = chance.choice(("user", "AKIA0123", "a%40b", ""))
    around = chance.choice(("", "/", "%2F", "@", "?", "#", " ", ":", "(", "'", "[", "{"))
    password = f"{secret}{around}x" if chance.random() < 0.5 else f"x{around}{secret}"
    # A slash or the like makes the user name a host, unless no port can be read behind it.
    return f"{user}:{password}"


def _query(chance: random.Random, secret: str) -> str:
    before = chance.choice(("", "name=a(1).jsonl&", "q=it's&", "x=[1]&", "a=b c&", "v=%26&", "e&"))
    after = chance.choice(("", "&x=1", "&se=2026-01-01T00:00:00Z", "#part", ")"))
    start = chance.choice(("?", "?", "?", "#"))
    parameter = f"{chance.choice(NAMES)}={secret}"
    query = f"{before}{parameter}{after}"
    return start + (quote(query) if chance.random() < 0.1 else query)


WITHOUT = (
    "hf://bert-base-uncased@main",
    "hf://datasets/a/b@refs%2Fpr%2F1/data/*.json?",
    "s3://bucket/date=2026-01-01/part?.tar",
    "s3://bucket/a@b/c#d",
    "gs://bucket/[ab]/{x,y}/**",
    "https://host:8443/a(1).jsonl",
    "https://host/a%40b@c",
    "https://host/tokens/key/password.txt",
    "http://[::1]:9000/x",
    "file:///home/me/a.txt",
    "docker://ubuntu:24.04@sha256:0123456789abcdef",
    "git+ssh://git@github.com/a/b@v1",
    "git+https://github.com/a/b@main",
    "see http://localhost:PORT/TOKEN/.",
    "https://docs.example.com/page#a-section",
    "https://host/x?page=2&max_tokens=5&tokenizer=bert&keyword=k",
)
