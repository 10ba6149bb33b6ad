"""Writes cloze probes: what does a language model learn from raw text, by category?

    python examples/cloze_probes.py > cloze.jsonl
    samestep fill runs/demo --probes cloze.jsonl

Four words take turns: each fits one of four sentences, and is a candidate in all of them. So a
model that ignores the sentence, however well it knows which words are frequent, has exactly 25 %.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

PROBES = {
    "preposition": """
        in: she was born _ the summer of 1920 .
        on: the book lies _ the table .
        with: he cut the bread _ a knife .
        from: the letter came _ her brother in france .

        of: the capital _ the country is a small town .
        to: he gave the money _ his son .
        by: the song was written _ a young man .
        at: she stayed _ home all day .

        between: the border _ the two countries is a river .
        during: he was wounded _ the war .
        under: the ship passed _ the bridge .
        against: the army fought _ the enemy .

        after: he died one year _ his wife .
        without: fish cannot live _ water .
        into: the river flows _ the sea .
        over: the bridge _ the river is very old .

        through: the road goes _ the forest .
        about: they talked _ the weather .
        for: she waited _ the train .
        as: his hands were as cold _ ice .
    """,
    "verb": """
        won: the team _ the game by two goals .
        wrote: she _ a book about her life .
        died: the old king _ in the night .
        married: in the church he _ the woman whom he loved .

        built: they _ a new bridge across the river .
        sang: she _ the song in a high voice .
        played: the two boys _ cards .
        taught: he _ history at the university .

        read: she _ the whole book in one day .
        ate: the children _ bread and fish .
        lost: the army _ the battle .
        opened: he _ the door with his key .

        published: the newspaper _ his letter on its first page .
        elected: the people _ a new president .
        released: the band _ their second album .
        directed: a policeman _ the traffic .

        began: the war _ in may and ended in june .
        flew: the bird _ over the trees with its wings .
        moved: he _ the chair to the window .
        killed: the soldiers _ three men in the attack .
    """,
    "time": """
        years: the king ruled the country for thirty _ .
        minutes: the song is four _ long .
        days: a week has seven _ .
        months: a year has twelve _ .

        morning: the sun rises early in the _ .
        night: the stars are seen at _ .
        winter: the coldest part of the year is the _ .
        summer: the hottest part of the year is the _ .

        today: the old church still stands _ .
        yesterday: he has been ill since _ .
        tomorrow: today is monday , so _ is tuesday .
        soon: he fell ill and _ died .

        before: she had never seen the sea _ .
        ago: he is ten now , so he was born ten years _ .
        later: he was born in 1920 and died fifty years _ , in 1970 .
        once: he was married not twice but only _ .

        first: january is the _ month of the year .
        second: february is the _ month of the year .
        last: december is the _ month of the year .
        next: he left on monday and came back the _ day , on tuesday .
    """,
    "place": """
        london: the capital of england is _ .
        paris: the capital of france is _ .
        rome: the capital of italy is _ .
        berlin: the capital of germany is _ .

        river: they crossed the _ by the bridge .
        mountain: they climbed the _ to its top .
        island: the _ lies in the sea , far from the land .
        city: they walked the streets of the _ .

        school: the children learn to read at _ .
        church: the people pray at _ .
        hospital: the doctor treats the sick at the _ .
        station: the train stops at the _ .

        china: he spoke chinese , as he was born in _ .
        japan: he spoke japanese , as he was born in _ .
        spain: he spoke spanish , as he was born in _ .
        russia: he spoke russian , as he was born in _ .

        north: the needle of a compass points to the _ .
        south: birds fly to the warm _ in winter .
        east: the sun rises in the _ .
        west: the sun sets in the _ .
    """,
    "number": """
        two: one and one is _ .
        four: a horse has _ legs .
        five: a hand has _ fingers .
        seven: a week has _ days .

        three: one , two , _ , four , five .
        six: four , five , _ , seven , eight .
        eight: six , seven , _ , nine , ten .
        nine: seven , eight , _ , ten .

        second: the first , the _ , the third .
        third: the second , the _ , the fourth .
        fourth: the third , the _ , the fifth .
        fifth: the fourth , the _ , the sixth .

        twelve: a year has _ months .
        hundred: a century is one _ years .
        thousand: ten times a hundred is a _ .
        million: a thousand times a thousand is a _ .

        single: only one , a _ person , was there .
        both: the two brothers _ died .
        many: not few but _ people came .
        half: thirty minutes are _ an hour .
    """,
    "chemistry": """
        oxygen: sugar is composed of carbon , hydrogen and _ .
        salt: the sea is not sweet , as its water is full of _ .
        ice: at zero degrees , water becomes _ .
        iron: steel is made of carbon and _ .

        gas: oxygen is neither solid nor liquid but a _ .
        metal: iron is a hard _ .
        acid: the juice of a lemon is a weak _ .
        element: atoms of another kind are another _ .

        hydrogen: water is composed of oxygen and _ .
        carbon: diamonds are a pure form of _ .
        gold: the ring is yellow , as it is made of _ .
        copper: the wires that carry electricity are made of _ .

        boils: at one hundred degrees , water _ .
        melts: in the heat of the sun , ice _ .
        burns: in a fire , wood _ .
        rusts: in wet air , iron _ .

        atoms: a molecule is made of several _ .
        electrons: around the core of an atom move its _ .
        crystals: salt forms small white _ .
        metals: gold , silver and iron are _ .
    """,
    "common sense": """
        water: fish live in _ .
        fire: the wood burns in the _ .
        air: birds fly through the _ .
        earth: the roots of a tree are in the _ .

        knife: he cut the meat with a _ .
        pen: he wrote the letter with a _ .
        key: he opened the door with a _ .
        gun: he shot the animal with a _ .

        king: the man who rules the country is the _ .
        queen: the woman who rules the country is the _ .
        prince: the son of the king is the _ .
        princess: the daughter of the king is the _ .

        hot: the fire burned his hand , as it was so _ .
        cold: he wore a thick coat , as the wind was so _ .
        dark: she could see nothing , as the room was so _ .
        bright: the light was so _ that it hurt his eyes .

        eyes: we see with our _ .
        ears: we hear with our _ .
        hands: we write with our _ .
        legs: we walk with our _ .
    """,
    "judgment": """
        good: the actors were great and i loved every minute , what a _ film .
        bad: the actors were weak and i hated every minute , what a _ film .
        long: it lasted four hours , what a _ film .
        short: it lasted ten minutes , what a _ film .

        happy: she smiled and laughed , as she was very _ .
        sad: she cried and cried , as she was very _ .
        angry: she shouted at him and struck him , as she was very _ .
        tired: she slept at once , as she was very _ .

        best: nothing was ever better , it is the _ .
        worst: nothing was ever as bad , it is the _ .
        longest: nothing takes more time , it is the _ .
        oldest: nothing is of an earlier age , it is the _ .

        success: all liked it , and it was a great _ .
        failure: nobody liked it , and it was a great _ .
        surprise: nobody had expected it , and it was a great _ .
        danger: it could kill us all , and it was a great _ .

        love: he kissed her and felt _ .
        fear: he ran from the lion and felt _ .
        pain: he broke his leg and felt _ .
        anger: he shouted at the thief and felt _ .
    """,
}
"""Group -> sets of four lines, `WORD: SENTENCE`, with `_` in the place of the word."""


def probes() -> Iterator[dict[str, object]]:
    for group, lines in PROBES.items():
        for four in lines.split("\n\n"):
            sentences = dict(line.strip().split(": ", 1) for line in four.strip().splitlines())
            for word, sentence in sentences.items():
                yield {
                    "text": sentence.replace("_", "[MASK]"),
                    "candidates": list(sentences),
                    "label": word,
                    "group": group,
                }


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(probe) + "\n" for probe in probes())
