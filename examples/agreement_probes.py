"""Writes probes of subject-verb agreement: does a language model know that "the keys ... are"?

    python examples/agreement_probes.py > agreement.jsonl
    samestep fill runs/demo --probes agreement.jsonl

As in Linzen et al. 2016 and Marvin & Linzen 2018, a phrase between subject and verb may have
another noun, of the same number or of the other one, which attracts the verb.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

NOUNS = (
    *("river", "city", "king", "house", "book", "church", "player", "school", "bridge", "road"),
    *("island", "song", "team", "village", "ship", "film", "station", "castle", "doctor"),
    "student",
)
PLACES = ("near", "behind", "beside", "of")
VERBS = (
    ("is", "are", "very old ."),
    ("was", "were", "found in the north ."),
    ("has", "have", "been in the country for a long time ."),
)


def plural(noun: str) -> str:
    if noun.endswith(("s", "sh", "ch")):
        return f"{noun}es"
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def probes() -> Iterator[dict[str, object]]:
    for number, noun in enumerate(NOUNS):
        other = NOUNS[(number + 7) % len(NOUNS)]
        place = PLACES[number % len(PLACES)]
        for singular, several, rest in VERBS:
            for is_plural in (False, True):
                subject = plural(noun) if is_plural else noun
                same, opposite = (other, plural(other))[:: -1 if is_plural else 1]
                phrases = {
                    "adjacent": "",
                    "same number": f"{place} the {same} ",
                    "other number": f"{place} the {opposite} ",
                }
                for group, phrase in phrases.items():
                    yield {
                        "text": f"the {subject} {phrase}[MASK] {rest}",
                        "candidates": [singular, several],
                        "label": several if is_plural else singular,
                        "group": group,
                    }


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(probe) + "\n" for probe in probes())
