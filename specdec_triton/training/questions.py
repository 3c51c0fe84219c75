"""What a user might ask: templates and words, of which there are enough combinations. Small models ask themselves odd things.

None of them is one of bench/prompts.jsonl (a test sees to that), whose acceptance is measured.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_WORDS = {
    "thing": """a volcano|a rainbow|the heart|a battery|the internet|an earthquake|photosynthesis|gravity|a glacier|the moon|sleep|yeast|
        a computer chip|a vaccine|electricity|a satellite|the stock market|inflation|a telescope|soil|a bridge|the water cycle|a magnet|
        glass|memory|evolution|a black hole|the ozone layer|a solar panel|a nuclear reactor|recycling|a microwave oven|cloud computing|
        machine learning|DNA|an atom|a hurricane|coral reefs|democracy|a mortgage|insurance|compound interest|the immune system|honey|
        chocolate|coffee|bread|cheese|a clock|a piano|a camera|an airplane|a submarine|radio|GPS|concrete|steel|plastic|paper|soap|salt""",
    "pair": """a crocodile and an alligator|weather and climate|a comet and an asteroid|a lake and a pond|speed and velocity|mass and weight|
        a debit card and a credit card|stocks and bonds|jam and jelly|a frog and a toad|a list and a tuple in Python|baking and roasting|
        an alpaca and a llama|a novel and a short story|empathy and sympathy|a cold and the flu|mitosis and meiosis|TCP and UDP|
        arteries and veins|a simile and a metaphor|a mean and a median|renewable and fossil energy|a butterfly and a moth|rugby and football""",
    "why": """do cats purr|is the sea salty|do we dream|do leaves change colour in autumn|do onions make us cry|is exercise important|do birds migrate|
        does bread rise|is Pluto not a planet|do we have time zones|does ice float|are bees important|do stars twinkle|do people yawn|
        is biodiversity important|do prices rise|does metal rust|do we need vitamins|are some deserts cold|do cities grow|is teamwork useful""",
    "fact": """is the capital of Australia|is the largest ocean|is the longest river in Africa|is the boiling point of water|is the chemical symbol of gold|
        are the primary colours|are the planets of the solar system|is the square root of 144|are the main causes of the First World War|
        is the speed of light|are the parts of a plant|are the states of matter|is the currency of Japan|are the five senses|is the Great Wall|
        are the seven continents|is the population of India|is the purpose of the United Nations|are the symptoms of dehydration""",
    "who": """painted the Mona Lisa|discovered penicillin|wrote Hamlet|invented the telephone|was Marie Curie|was the first person on the moon|built the pyramids|
        was Nelson Mandela|composed the Four Seasons|was Leonardo da Vinci|discovered gravity|was Cleopatra|invented the printing press|
        wrote Pride and Prejudice|was Mahatma Gandhi|founded Microsoft|was Albert Einstein|wrote War and Peace|was Ada Lovelace""",
    "howto": """grow tomatoes on a balcony|learn a new language|write a cover letter|save money|make pancakes|train a puppy|fix a flat bicycle tyre|
        prepare for a job interview|sleep better|remove a stain from a carpet|start a blog|learn to swim|boil an egg|clean a keyboard|
        improve my handwriting|plan a budget|take better photos|stop procrastinating|make friends in a new city|cook rice|paint a room|
        start running|write a poem|organise my desk|grow herbs|wash a wool sweater|choose a laptop|read more books|meditate|give a speech""",
    "event": """a school party|a wedding|a picnic in the park|a weekend in Rome|a team meeting|a garage sale|a book club|a camping trip|a family reunion|
        a science fair|a farewell party|a road trip|a charity run|a game night|a cooking class|a birthday of a friend who likes music""",
    "person": "my landlord|my teacher|a customer|my manager|a neighbour|my aunt|a supplier|my team|a friend|the library|a hotel|my doctor",
    "matter": """that the heating is broken|that I will be late tomorrow|for more time to finish the report|for a day off on Friday|about a missing parcel|
        to thank them for their help|about a change of plans|for a letter of recommendation|to confirm the appointment|about a noisy party|
        to invite them to dinner|to apologise for a mistake|about an invoice that was paid twice|for feedback on my proposal""",
    "scene": """a busy market in the morning|an old library|a storm at sea|a forest after rain|a train station at night|a small village in winter|
        a beach at sunset|a kitchen full of smells|an empty theatre|a mountain lake|a city seen from above|a garden in spring|a desert road""",
    "hero": """a lost robot|a brave mouse|a lonely lighthouse keeper|two sisters|a talking tree|a young inventor|a dragon who is afraid of fire|an old sailor|
        a detective and her cat|a boy who finds a map|a baker with a secret|a girl who can speak to birds|a clockmaker|a curious fox""",
    "subject": """friendship|the ocean|autumn|time|courage|home|music|the night sky|a long journey|hope|rain|memories|freedom|the first day of school""",
    "good": """regular exercise|reading|a balanced diet|public transport|meditation|learning music|drinking water|working from home|volunteering|
        solar energy|team sports|keeping a diary|early rising|urban gardens|open source software|travelling|walking every day|cooking at home""",
    "code": """adds two numbers|reverses a string|finds the largest number in a list|counts the vowels in a text|checks whether a number is prime|
        sorts a list of names by length|removes duplicates from a list|computes the factorial of a number|converts Celsius to Fahrenheit|
        reads a CSV file|merges two dictionaries|flattens a nested list|counts words in a file|returns the average of a list|finds common elements|
        validates an email address|rolls a dice|draws a triangle of stars|computes a running total|groups words by their first letter""",
    "sentence": """The shop closes at six o'clock.|I have never been to the north of the country.|Can you tell me where the post office is?|
        She works in a hospital near the river.|The children are playing in the garden.|We need two tickets for tomorrow morning.|
        My bicycle was stolen last week.|The soup is too hot to eat.|He forgot his umbrella at home.|They have lived here since 2010.|
        It is the most beautiful village I know.|The meeting was moved to Thursday afternoon.|I would like a cup of tea without sugar.""",
    "language": "French|Spanish|German|Italian|Portuguese|Dutch",
    "name": "Anna|Ben|Maria|Tom|Lucy|Omar|Sara|Peter|Mia|Jack|Nina|Paul",
    "item": "notebooks|tickets|books|eggs|pencils|bottles|chairs|cakes|shirts|plants|stamps|oranges|tiles|cups",
    "old": "an eight-year-old|a teenager|a beginner|my grandmother|a friend|a child|someone who knows nothing about it",
}  # fmt: skip
_LISTS = {kind: [re.sub(r"\s+", " ", x).strip() for x in words.split("|")] for kind, words in _WORDS.items()}
TEMPLATES = (
    "Explain {thing} to {old}.", "How does {thing} work?", "What is {thing}?", "What is {thing} and why does it matter?",
    "Tell me three interesting facts about {thing}.", "Where does {thing} come from?", "Write a short paragraph about {thing}.",
    "What is the difference between {pair}?", "Compare {pair}.", "Why {why}?", "Explain why {why}. Keep it short.", "What {fact}?",
    "What {fact}? Answer in one sentence.", "Who {who}?", "Who {who}, and when?", "How do I {howto}?", "How can I {howto} in a week?",
    "Give me {few} tips on how to {howto}.", "What do I need to {howto}?", "What are common mistakes when you {howto}?",
    "Give me {few} ideas for {event}.", "Make a checklist for {event}.", "What should I bring to {event}?", "Help me plan {event}.",
    "Write a polite email to {person} {matter}.", "Write a short message to {person} {matter}.",
    "Describe {scene} in one paragraph.", "Describe {scene} in {few} sentences.", "Write a short story about {hero}.",
    "Write the beginning of a story about {hero}.", "Write a poem about {subject}.", "Write a short text about {subject}.",
    "What are the benefits of {good}?", "List {few} advantages and disadvantages of {good}.", "Is {good} worth it? Explain.",
    "Write a Python function that {code}.", "Write a Python function that {code}, and explain it.", "How do I write code that {code}?",
    "Translate into {language}: {sentence}", "Rewrite this sentence in other words: {sentence}", "Is this sentence correct? {sentence}",
    "{name} has {a} {item} and buys {b} more. How many {item} does {name} have?",
    "There are {a} {item} in {b} boxes, the same number in each. How many are in {few} boxes? Show your steps.",
    "{name} buys {few} {item} for {price} each. How much is that in total? Explain.",
    "A car drives {b0} kilometres in {few} hours. What is its average speed?", "If {few} {item} cost {price}, how much do {more} {item} cost?",
    "A jacket costs {b0} dollars and is reduced by {few}0 percent. What does it cost now? Think step by step.",
    "What is {a} times {b}? Show each step.", "What is {few}0 percent of {b0}?", "Compute {a} + {b0} - {b}.", "What is {b0} divided by {few}?",
    "A room is {a} metres long and {b} metres wide. How large is it?", "{name} starts work at 8:{a} and works for {few} hours. When does {name} stop?",
    "A square has a side of {a} cm. What are its area and its perimeter?", "{name} reads {b} pages a day. How long does a book of {b0} pages take?",
)  # fmt: skip


_BEFORE = ("", "", "", "", "Please help me: ", "Hi! ", "Quick question: ", "I am curious. ")
_BEHIND = (
    "",
    "",
    "",
    "",
    " Keep it short.",
    " Use simple words.",
    " Give an example.",
    " Answer in detail.",
    " Thanks!",
    " Be precise.",
)
_NUMBERS: dict[str, Callable[[random.Random], object]] = {
    "a": lambda rng: rng.randint(11, 59),
    "b": lambda rng: rng.randint(3, 24),
    "b0": lambda rng: 10 * rng.randint(4, 48),
    "few": lambda rng: rng.randint(2, 9),
    "more": lambda rng: rng.randint(10, 19),
    "price": lambda rng: f"{rng.randint(1, 12)}.{rng.randint(1, 9)}0",
}


def question(rng: random.Random) -> str:
    """One of them."""
    chosen: dict[str, str] = {}  # the same word wherever it stands

    def filled(match: re.Match[str]) -> str:
        slot = match[1]
        if slot not in chosen:
            chosen[slot] = str(_NUMBERS[slot](rng)) if slot in _NUMBERS else rng.choice(_LISTS[slot])
        return chosen[slot]

    return rng.choice(_BEFORE) + re.sub(r"\{(\w+)\}", filled, rng.choice(TEMPLATES)) + rng.choice(_BEHIND)
