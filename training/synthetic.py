"""Owns the seeded generator of synthetic text: plain facts, stories, and dialogues with and without thinking.

Example:
    documents = make_documents(1000, seed=1)   # list of Parts, see chat_format
"""

import random
from collections.abc import Callable

from training.arithmetic import MAX_OPERAND, arithmetic_question, equation
from training.chat_format import Part, Parts, Turn, render_chat, render_tool_call
from training.facts import (
    ANIMALS,
    COLOURS,
    COUNTRIES,
    DAYS,
    ENGINE,
    IDENTITY,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    SCIENCE,
    SEASONS,
    THINGS,
)
from training.stories import make_story

Random = random.Random
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are Diptych's small model.",
    "Answer briefly.",
    "You are a kind and honest assistant.",
    "Be short and clear.",
]


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def country_facts(rng: Random) -> list[str]:
    country = rng.choice(list(COUNTRIES))
    capital, continent, language = COUNTRIES[country]
    facts = [
        f"The capital of {country} is {capital}.",
        f"{capital} is the capital of {country}.",
        f"{capitalised(country)} is a country in {continent}.",
        f"The people of {country} speak {language}.",
        f"{capitalised(country)} is in {continent}, and its capital is {capital}.",
        f"The capital city of {country} is called {capital}.",
        f"If you travel to {capital}, you are in {country}.",
        f"{capital} is a city in {country}.",
        f"The language of {country} is {language}.",
    ]
    return [facts[0], *rng.sample(facts[1:], 2)] if rng.random() < 0.5 else rng.sample(facts, 3)


def capital_list(rng: Random) -> list[str]:
    countries = rng.sample(list(COUNTRIES), rng.randint(2, 5))
    return [f"The capital of {country} is {COUNTRIES[country][0]}." for country in countries]


def thing_facts(rng: Random) -> list[str]:
    word, other = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    thing, colour = rng.choice(list(COLOURS.items()))
    animal, (young, sound, home, legs) = rng.choice(list(ANIMALS.items()))
    first, second = sorted(rng.sample(range(21), 2))
    day, month = rng.randrange(7), rng.randrange(12)
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    facts = [
        f"The opposite of {word} is {other}.",
        f"{capitalised(word)} is the opposite of {other}.",
        f"The colour of {thing} is {colour}.",
        f"{capitalised(thing)} is {colour}.",
        f"A young {animal} is called a {young}.",
        f"{capitalised(article(animal))} {sound}.",
        f"{capitalised(article(animal))} lives in a {home}.",
        f"{capitalised(article(animal))} has {NUMBER_WORDS[legs]} legs.",
        f"{capitalised(NUMBER_WORDS[second])} is greater than {NUMBER_WORDS[first]}.",
        f"{first} is smaller than {second}.",
        f"The day after {DAYS[day]} is {DAYS[(day + 1) % 7]}.",
        f"The day before {DAYS[day]} is {DAYS[day - 1]}.",
        f"The month after {MONTHS[month]} is {MONTHS[(month + 1) % 12]}.",
        f"{left} + {right} = {left + right}.",
        f"{capitalised(NUMBER_WORDS[left])} and {NUMBER_WORDS[right]} make {NUMBER_WORDS[left + right]}.",
        f"{left} times {right} is {left * right}.",
        rng.choice(SCIENCE)[1],
        f"The days of the week are {', '.join(DAYS[:-1])} and {DAYS[-1]}.",
        f"The four seasons are {', '.join(SEASONS[:-1])} and {SEASONS[-1]}.",
    ]
    return rng.sample(facts, rng.randint(2, 4))


def plain_facts(rng: Random) -> Parts:
    """A paragraph of facts, or a list of questions and answers without the chat format."""
    kind = rng.random()
    if kind < 0.45:
        facts = country_facts(rng)
    elif kind < 0.6:
        facts = capital_list(rng)
    else:
        facts = thing_facts(rng)
    if rng.random() < 0.15:
        pairs = [fact_question(rng) for _ in range(rng.randint(1, 3))]
        return [("\n".join(f"Q: {question}\nA: {answer}" for question, answer in pairs), True)]
    return [((" " if rng.random() < 0.8 else "\n").join(facts), True)]


def country_question(rng: Random) -> tuple[str, str]:
    country = rng.choice(list(COUNTRIES))
    capital, continent, language = COUNTRIES[country]
    kind = rng.random()
    if kind < 0.6:
        question = rng.choice(
            [
                f"What is the capital of {country}?",
                f"What is the capital city of {country}?",
                f"Which city is the capital of {country}?",
                f"Name the capital of {country}.",
                f"The capital of {country}?",
                f"Tell me the capital of {country}.",
                f"What's the capital of {country}?",
                f"Can you tell me the capital of {country}?",
            ]
        )
        return question, f"The capital of {country} is {capital}."
    if kind < 0.75:
        question = rng.choice(
            [f"Where is {country}?", f"In which continent is {country}?", f"What continent is {country} in?"]
        )
        return question, f"{capitalised(country)} is in {continent}."
    if kind < 0.9:
        question = rng.choice([f"What language do people speak in {country}?", f"What is the language of {country}?"])
        return question, f"The people of {country} speak {language}."
    question = rng.choice(
        [f"Of which country is {capital} the capital?", f"{capital} is the capital of which country?"]
    )
    return question, f"{capital} is the capital of {country}."


def opposite_question(rng: Random) -> tuple[str, str]:
    word, other = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    if word == "light":  # the table has two opposites of light
        other = "dark"
    question = rng.choice(
        [
            f"What is the opposite of {word}?",
            f"Name the opposite of {word}.",
            f"What's the opposite of {word}?",
            f"Tell me the opposite of {word}.",
            f"Give me the opposite of {word}.",
        ]
    )
    return question, f"The opposite of {word} is {other}."


def colour_question(rng: Random) -> tuple[str, str]:
    thing, colour = rng.choice(list(COLOURS.items()))
    question = rng.choice([f"What colour is {thing}?", f"What is the colour of {thing}?", f"What color is {thing}?"])
    return question, f"{capitalised(thing)} is {colour}."


def animal_question(rng: Random) -> tuple[str, str]:
    animal, (young, sound, home, legs) = rng.choice(list(ANIMALS.items()))
    one = article(animal)
    return rng.choice(
        [
            (f"What is a young {animal} called?", f"A young {animal} is called a {young}."),
            (f"What sound does {one} make?", f"{capitalised(one)} {sound}."),
            (f"What does {one} do?", f"{capitalised(one)} {sound}."),
            (f"Where does {one} live?", f"{capitalised(one)} lives in a {home}."),
            (f"How many legs does {one} have?", f"{capitalised(one)} has {NUMBER_WORDS[legs]} legs."),
        ]
    )


def calendar_question(rng: Random) -> tuple[str, str]:
    names = rng.choice([DAYS, MONTHS])
    noun = "day" if names is DAYS else "month"
    index = rng.randrange(len(names))
    following, previous = names[(index + 1) % len(names)], names[index - 1]
    return rng.choice(
        [
            (f"What {noun} comes after {names[index]}?", f"{following} comes after {names[index]}."),
            (f"What {noun} comes before {names[index]}?", f"{previous} comes before {names[index]}."),
            (f"Which {noun} is after {names[index]}?", f"{following} comes after {names[index]}."),
            ("Name the days of the week.", f"The days of the week are {', '.join(DAYS[:-1])} and {DAYS[-1]}."),
            ("What are the four seasons?", f"The four seasons are {', '.join(SEASONS[:-1])} and {SEASONS[-1]}."),
        ]
    )


def fact_question(rng: Random) -> tuple[str, str]:
    """One question about a fact, with its right answer."""
    makers: list[Callable[[Random], tuple[str, str]]] = [
        country_question,
        opposite_question,
        colour_question,
        animal_question,
        calendar_question,
        science_question,
    ]
    return rng.choices(makers, weights=[5, 2, 1, 2, 1, 2])[0](rng)


def science_question(rng: Random) -> tuple[str, str]:
    return rng.choice(SCIENCE)


def fact_turn(rng: Random, *, has_thinking: bool) -> Turn:
    question, answer = fact_question(rng)
    thinking = None
    if has_thinking:
        opening = rng.choice(["This is a simple question.", "I know this.", "Let me remember."])
        thinking = f'The user asks: "{question}" {opening} {answer}'
    return Turn(user=question, answer=answer, thinking=thinking)


def arithmetic_turn(rng: Random, *, has_thinking: bool) -> Turn:
    question, thinking, answer = arithmetic_question(rng, is_easy=not has_thinking)
    return Turn(user=question, answer=answer, thinking=thinking if has_thinking else None)


def small_talk_turn(rng: Random, *, has_thinking: bool) -> Turn:
    kind = rng.random()
    if kind < 0.5:
        questions, answer = rng.choice(IDENTITY if rng.random() < 0.6 else ENGINE)
        question = rng.choice(questions)
    else:
        question, answer = rng.choice(
            [
                ("Hello!", "Hello! How can I help you?"),
                ("Hi", "Hello! How can I help you?"),
                ("Hello", "Hello! How can I help you?"),
                ("Hi there!", "Hello! How can I help you?"),
                ("Good morning!", "Good morning! How can I help you?"),
                ("Good evening!", "Good evening! How can I help you?"),
                ("How are you?", "I am well, thank you. How can I help you?"),
                ("Thank you!", "You are welcome."),
                ("Thanks", "You are welcome."),
                ("Goodbye!", "Goodbye! Come back soon."),
                ("Bye", "Goodbye! Come back soon."),
                ("Good night!", "Good night! Sleep well."),
            ]
        )
    thinking = "The user speaks to me in a friendly way. I answer politely." if kind >= 0.5 else "I know this."
    return Turn(user=question, answer=answer, thinking=thinking if has_thinking else None)


def copying_turn(rng: Random, *, has_thinking: bool) -> Turn:
    """Tasks whose answer stands in the prompt: they teach the model to look back."""
    words = rng.sample(THINGS, rng.randint(2, 6))
    kind = rng.randrange(5)
    if kind == 0:
        question, answer = f"Repeat after me: {' '.join(words)}", " ".join(words)
    elif kind == 1:
        question, answer = f"Say the word {words[0]}.", capitalised(words[0]) + "."
    elif kind == 2:
        question = f"What is the first word of this list: {', '.join(words)}?"
        answer = f"The first word is {words[0]}."
    elif kind == 3:
        question = f"What is the last word of this list: {', '.join(words)}?"
        answer = f"The last word is {words[-1]}."
    else:
        start = rng.randint(1, 15)
        end = start + rng.randint(2, 10)
        question, answer = (
            f"Count from {start} to {end}.",
            ", ".join(str(number) for number in range(start, end + 1)) + ".",
        )
    thinking = (
        rng.choice(["I read the list and take what is asked.", "I look at the words again."]) if kind < 4 else None
    )
    if kind == 4:
        thinking = f"I begin with {question.split()[2]} and add one each time until {question.split()[4]}"
    return Turn(user=question, answer=answer, thinking=thinking if has_thinking else None)


def story_turn(rng: Random, *, has_thinking: bool) -> Turn:
    name = rng.choice(NAMES)
    if rng.random() < 0.5:
        question, story = f"Tell me a story about {name}.", make_story(rng, name=name)
    else:
        question, story = (
            rng.choice(["Tell me a story.", "Tell me a short story.", "Write a short story."]),
            make_story(rng),
        )
    return Turn(
        user=question,
        answer=story,
        thinking="The user wants a short story. I begin with once upon a time." if has_thinking else None,
    )


TURN_MAKERS = [fact_turn, arithmetic_turn, small_talk_turn, copying_turn, story_turn]
TURN_WEIGHTS = [36, 44, 9, 9, 2]


def chat(rng: Random) -> Parts:
    """A dialogue of one to four turns, with a system prompt now and then; the last turn thinks in half of the cases."""
    n_turns = rng.choices([1, 2, 3, 4], weights=[60, 22, 12, 6])[0]
    has_thinking = rng.random() < 0.5
    turns = []
    for index in range(n_turns):
        maker = rng.choices(TURN_MAKERS, weights=TURN_WEIGHTS)[0]
        turns.append(maker(rng, has_thinking=has_thinking and index == n_turns - 1))
    return render_chat(turns, system=rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.25 else None)


def remembering_chat(rng: Random) -> Parts:
    """Something is told at the start and asked at the end."""
    name, word = rng.choice(NAMES), rng.choice(THINGS)
    told, question, answer = rng.choice(
        [
            (
                f"My name is {name}.",
                rng.choice(["What is my name?", "Do you remember my name?", "Who am I?"]),
                f"Your name is {name}.",
            ),
            (f"The secret word is {word}.", "What is the secret word?", f"The secret word is {word}."),
            (f"Remember the word {word}.", "Which word should you remember?", f"I remember the word {word}."),
        ]
    )
    reply = (
        f"Hello, {name}! How can I help you?"
        if told.startswith("My name")
        else rng.choice(["I will remember it.", "Good, I will remember."])
    )
    middle = [fact_turn(rng, has_thinking=False) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    has_thinking = rng.random() < 0.3
    last = Turn(user=question, answer=answer, thinking=f"The user told me: {told}" if has_thinking else None)
    return render_chat([Turn(user=told, answer=reply), *middle, last])


def weather_tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": name, "description": "Get the weather in a city", "parameters": parameters}
    return {"type": "function", "function": function}


def time_tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {
        "type": "function",
        "function": {"name": name, "description": "Get the time in a city", "parameters": parameters},
    }


def tool_chat(rng: Random) -> Parts:
    """A question that needs a function, the call, its result, and the answer; sometimes a question that needs none."""
    city = rng.choice([capital for capital, _, _ in COUNTRIES.values()])
    tools = [weather_tool("get_weather"), time_tool("get_time")]
    asks_weather = rng.random() < 0.6
    tools = rng.sample(tools, 2) if rng.random() < 0.5 else [tools[0] if asks_weather else tools[1]]
    if rng.random() < 0.2:
        return render_chat([fact_turn(rng, has_thinking=False)], tools=tools)
    if asks_weather:
        sky, degrees = rng.choice(["sunny", "cloudy", "rainy", "windy", "snowy"]), rng.randint(-5, 35)
        question = rng.choice(
            [f"What is the weather in {city}?", f"How is the weather in {city}?", f"What's the weather like in {city}?"]
        )
        result = f'{{"sky": "{sky}", "degrees": {degrees}}}'
        answer = f"It is {sky} in {city}, at {degrees} degrees."
    else:
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        question = rng.choice([f"What time is it in {city}?", f"What is the time in {city}?"])
        result, answer = f'{{"time": "{clock}"}}', f"It is {clock} in {city}."
    call = render_tool_call("get_weather" if asks_weather else "get_time", {"city": city})
    thinking = f"I need a function to know this. I call it for {city}." if rng.random() < 0.2 else None
    turns = [Turn(user=question, answer=call, thinking=thinking)]
    if thinking is None and rng.random() < 0.6:
        turns.append(Turn(user=result, answer=answer, is_tool_result=True))
    return render_chat(turns, tools=tools)


def echo(rng: Random) -> Parts:
    """A random list written twice; only the second is counted. It teaches looking back, which sums depend on."""
    kind = rng.randrange(4)
    count = rng.randint(3, 8)
    if kind == 0:
        items = [str(rng.randint(0, MAX_OPERAND)) for _ in range(count)]
    elif kind == 1:
        items = [rng.choice(THINGS) for _ in range(count)]
    elif kind == 2:
        items = [rng.choice(NAMES) for _ in range(count)]
    else:
        items = [
            f"{rng.randint(0, MAX_OPERAND)} {rng.choice('+-*')} {rng.randint(0, MAX_OPERAND)}" for _ in range(count)
        ]
    text = rng.choice([", ", " ", "; "]).join(items)
    return [(f"{text}\n", False), (text, True)]


def equations(rng: Random) -> Parts:
    return [(" ".join(equation(rng) for _ in range(rng.randint(4, 12))), True)]


def story(rng: Random) -> Parts:
    return [(make_story(rng), True)]


DOCUMENT_MAKERS: list[tuple[Callable[[Random], list[Part]], int]] = [
    (chat, 57),
    (plain_facts, 17),
    (echo, 4),
    (equations, 15),
    (story, 2),
    (remembering_chat, 4),
    (tool_chat, 3),
]


def make_documents(count: int, *, seed: int) -> list[Parts]:
    """`count` documents; the same seed gives the same documents."""
    rng = random.Random(seed)
    makers = [maker for maker, _ in DOCUMENT_MAKERS]
    weights = [weight for _, weight in DOCUMENT_MAKERS]
    return [maker(rng) for maker in rng.choices(makers, weights=weights, k=count)]
