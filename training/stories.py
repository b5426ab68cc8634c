"""Owns the short stories of the synthetic text: a small grammar, varied enough that few stories repeat.

Example:
    make_story(random.Random(1), name="Anna")
"""

import random

from training.facts import NAMES

Random = random.Random
PEOPLE = [
    "a poor woodcutter",
    "a kind miller",
    "an old fisherman",
    "a clever tailor",
    "a young shepherd",
    "a brave soldier",
    "a little girl",
    "a little boy",
    "a good queen",
    "a lonely king",
    "a baker",
    "a merry cobbler",
]
PLACES = [
    "near a dark forest",
    "by the sea",
    "in a small village",
    "on a high hill",
    "beside a wide river",
    "in a far country",
    "at the edge of the world",
    "in a house with a red door",
    "behind the old mill",
    "in a quiet valley",
]
HELPERS = [
    "a white bird",
    "a grey wolf",
    "a talking fish",
    "an old woman",
    "a little mouse",
    "a golden fox",
    "a lame horse",
    "a green frog",
    "a wise owl",
    "a black cat",
]
LOSSES = [
    "a silver key",
    "a golden ring",
    "a red cloak",
    "a warm lamp",
    "a wooden flute",
    "an old book",
    "a small bell",
    "a bag of seeds",
    "a white shell",
    "a blue stone",
]
WEATHERS = [
    "One cold winter morning",
    "One bright summer day",
    "One stormy night",
    "Early one spring morning",
    "One evening in autumn",
    "One day",
    "On the first day of May",
    "When the snow had melted",
]
ENDINGS = [
    "And they lived happily ever after.",
    "From that day on they were never hungry again.",
    "And so they became friends for life.",
    "And if they have not died, they are living there still.",
    "That night everyone slept well.",
    "And the whole village danced until the morning.",
    "After that nobody was afraid any more.",
]
FEELINGS = ["sad", "tired", "afraid", "lonely", "cold and hungry", "angry"]


def make_story(rng: Random, *, name: str | None = None) -> str:
    """One paragraph of about sixty words that begins with "Once upon a time"."""
    hero = name or rng.choice(NAMES)
    person, place, helper, loss = rng.choice(PEOPLE), rng.choice(PLACES), rng.choice(HELPERS), rng.choice(LOSSES)
    bare_helper, bare_loss = helper.split(" ", 1)[1], loss.split(" ", 1)[1]
    feeling = rng.choice(FEELINGS)
    opening = rng.choice(
        [
            f"Once upon a time there was {person} called {hero}, who lived {place}.",
            f"Once upon a time there lived {person} {place}, and the name was {hero}.",
            f"Once upon a time, {place}, there lived {person} whose name was {hero}.",
        ]
    )
    trouble = rng.choice(
        [
            f"{rng.choice(WEATHERS)} {hero} lost {loss} and was very {feeling}.",
            f"{rng.choice(WEATHERS)} a thief took {loss}, and {hero} was {feeling}.",
            f"{rng.choice(WEATHERS)} {hero} went out to look for {loss}, and came home {feeling}.",
        ]
    )
    meeting = rng.choice(
        [
            f'Then {helper} came along the road and said, "Why are you so {feeling}?"',
            f'In the wood sat {helper}. "Do not be {feeling}," said the {bare_helper}.',
            f'At the well {hero} met {helper}, and it said, "I will help you if you give me bread."',
        ]
    )
    answer = rng.choice(
        [
            f'"I have lost {loss}," said {hero}.',
            f"{hero} shared a piece of bread with the {bare_helper}.",
            f'"Help me, and I will thank you," said {hero}.',
            f"{hero} told the {bare_helper} everything.",
        ]
    )
    rescue = rng.choice(
        [
            f"They walked for three days, and under a tree they found the {bare_loss}.",
            f"The {bare_helper} ran away and came back with the {bare_loss}.",
            f"Together they climbed the hill, and there lay the {bare_loss} in the grass.",
            f'"Look behind the door," said the {bare_helper}, and there was the {bare_loss}.',
        ]
    )
    return " ".join([opening, trouble, meeting, answer, rescue, rng.choice(ENDINGS)])
