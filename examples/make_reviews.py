"""Write reviews.csv: short made-up reviews with their praise, a number from 0 (blame) to 1 (praise).

    python examples/make_reviews.py examples/reviews.csv

A review is about one subject, such as a hotel. It consists of clauses that praise or blame, some of them by a negation
("not bad at all"), and of neutral sentences. Its label is the mean of the values of its clauses, and later clauses
count more. The seed is fixed: the script always writes the same file.
"""

import csv
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COUNT = 1600
SEED = 7

GREAT = "wonderful, excellent, superb, fantastic, outstanding, delightful, marvellous, perfect, a joy, first-rate"
GOOD = "good, pleasant, lovely, impressive, better than I expected, well above average"
FAIR = "all right, decent, acceptable, fine, good enough"
POOR = "mediocre, disappointing, poor, unremarkable, worse than I expected, below average"
AWFUL = "terrible, awful, dreadful, horrible, appalling, a disgrace, a disaster, hopeless, miserable"
NEGATED_BLAME = "not bad at all, anything but dull, far from disappointing, hard to fault, never boring"
NEGATED_PRAISE = "not good, far from perfect, anything but pleasant, hardly impressive, nothing to be proud of"
GENERAL = {  # the values of words that fit every thing
    GREAT: 1.0,
    GOOD: 0.85,
    FAIR: 0.6,
    NEGATED_BLAME: 0.75,
    NEGATED_PRAISE: 0.2,
    POOR: 0.25,
    AWFUL: 0.0,
}
PRAISE_FRAMES = {  # clauses that fit every thing
    "I loved {}": 1.0,
    "we were delighted with {}": 0.95,
    "I was impressed by {}": 0.85,
    "I cannot praise {} enough": 1.0,
    "{} could not have been better": 1.0,
    "there was nothing wrong with {}": 0.7,
    "I cannot complain about {}": 0.7,
    "my favourite part was {}": 0.9,
}
BLAME_FRAMES = {
    "I hated {}": 0.0,
    "we were disappointed by {}": 0.15,
    "I was shocked by {}": 0.05,
    "I cannot warn you enough about {}": 0.0,
    "{} could not have been worse": 0.0,
    "there was nothing good about {}": 0.05,
    "I have to complain about {}": 0.1,
    "the worst part was {}": 0.1,
}
WORD_VALUES = (0.9, 0.1)  # of the words that only one thing has: those that praise and those that blame
EVENT_VALUES = (0.95, 0.05)
VERDICT_VALUES = (1.0, 0.0)

PRAISE_VERDICTS = """
I loved it
I would recommend it to anyone
it was worth every penny
I could not be happier
I have nothing to complain about
it made my week
five stars, without a doubt
it is the best that I have found so far
I am already looking forward to the next time
"""
BLAME_VERDICTS = """
I hated it
I would not recommend it to anyone
it was a waste of money
I could not be more annoyed
I have nothing good to say about it
it ruined my week
one star, and that is generous
it is the worst that I have seen so far
never again
"""


@dataclass(frozen=True)
class Subject:
    """A subject of reviews.

    Attributes:
        things: a line per thing: "the room was: words that praise | words that blame".
        praise, blame: a clause per line.
        praise_verdicts, blame_verdicts: a closing clause per line.
        neutral: a sentence per line, which praises and blames nothing.
    """

    things: str
    praise: str
    blame: str
    neutral: str
    praise_verdicts: str = PRAISE_VERDICTS
    blame_verdicts: str = BLAME_VERDICTS


SUBJECTS = [
    Subject(  # a hotel
        things="""
        the room was: spotless, quiet, bright, spacious | filthy, cramped, damp, noisy
        the bed was: soft, comfortable, enormous, freshly made | lumpy, rock hard, far too short, broken
        the staff were: friendly, helpful, attentive, charming | rude, unhelpful, bored, arrogant
        breakfast was: fresh, generous, delicious, full of choice | stale, cold, meagre, tasteless
        the view was: breathtaking, beautiful, stunning, worth the stairs | grim, ugly, blocked by a wall, depressing
        the bathroom was: gleaming, modern, sparkling clean, warm | mouldy, dirty, freezing, flooded
        """,
        praise="""
        the receptionist gave us a better room without being asked
        we slept like children
        the owner welcomed us with tea and cake
        they thought of every little detail
        somebody carried our bags up with a smile
        """,
        blame="""
        the air conditioning rattled all night
        nobody answered the phone at reception
        we found hair in the sink and dust under the bed
        they charged us twice and refused to apologise
        the walls were so thin that we hardly slept
        """,
        neutral="""
        We stayed for two nights in May.
        The hotel is ten minutes from the station.
        Our room was on the third floor.
        We had booked it in the spring.
        Check-in is from three in the afternoon.
        """,
    ),
    Subject(  # a restaurant
        things="""
        the soup was: rich, fragrant, warming, full of flavour | watery, lukewarm, bland, far too salty
        the fish was: tender, perfectly cooked, fresh, juicy | dry, overcooked, rubbery, full of bones
        the dessert was: light, heavenly, creamy, irresistible | sickly, stodgy, burnt, straight from a packet
        the waiter was: attentive, kind, funny, patient | surly, careless, impatient, nowhere to be seen
        the bread was: warm, crusty, homemade, addictive | stale, soggy, hard as a stone, mouldy
        the prices were: fair, honest, very reasonable, a bargain | outrageous, absurd, insulting, far too high
        """,
        praise="""
        the chef came out to ask whether we liked it
        every plate looked like a painting
        we scraped the bowls clean and ordered more
        they found us a table although we were late
        the whole table fell silent with pleasure
        """,
        blame="""
        we waited an hour for cold chips
        they forgot half of our order
        the table was sticky and the glasses were dirty
        I was ill for two days afterwards
        the meat went back to the kitchen twice
        """,
        neutral="""
        We went there on a Tuesday evening.
        It is a small place near the harbour.
        I had the soup and then the fish.
        There were four of us at the table.
        The menu changes every month.
        """,
    ),
    Subject(  # a film
        things="""
        the plot was: gripping, clever, full of surprises, moving | predictable, muddled, thin, full of holes
        the acting was: brilliant, honest, touching, full of life | wooden, lazy, embarrassing, lifeless
        the ending was: satisfying, beautiful, unforgettable, brave | rushed, ridiculous, pointless, flat
        the music was: haunting, gorgeous, uplifting, just right | intrusive, tedious, deafening, out of place
        the dialogue was: witty, sharp, tender, hilarious | clumsy, dull, painful, unintentionally silly
        the pictures were: dazzling, luminous, stunning, rich in colour | murky, ugly, shaky, cheap
        """,
        praise="""
        I laughed until I cried
        the two hours flew by
        the whole cinema applauded at the end
        I wanted to watch it again at once
        the leading actress lights up every scene
        """,
        blame="""
        I looked at my watch every five minutes
        half of the audience left before the end
        not one joke worked
        I fell asleep twice
        the story went nowhere and took its time about it
        """,
        neutral="""
        I saw it on a rainy Sunday.
        It is about two sisters who inherit a farm.
        The film is a little over two hours long.
        It was made in Norway.
        We sat in the fifth row.
        """,
    ),
    Subject(  # a book
        things="""
        the story was: gripping, original, touching, hard to put down | slow, confusing, tedious, impossible to follow
        the writing was: elegant, clear, vivid, full of wit | clumsy, pretentious, dry, full of clichés
        the characters were: believable, loveable, full of life, unforgettable | flat, irritating, hollow, unbelievable
        the first chapter was: thrilling, beautiful, a promise kept, very funny | dull, endless, a chore, off-putting
        the advice was: useful, wise, encouraging, easy to follow | useless, patronising, wrong, out of date
        """,
        praise="""
        I read it in a single night
        I have already bought a second copy for my sister
        every page taught me something
        I was sorry when it ended
        the author writes with warmth and humour
        """,
        blame="""
        I gave up after fifty pages
        every page repeats the one before
        the author plainly never checked a fact
        I had to force myself to finish it
        it put me to sleep every evening
        """,
        neutral="""
        I bought it at the airport.
        The book has about three hundred pages.
        It is set in Lisbon in the sixties.
        It is the second part of a series.
        I read most of it on the train.
        """,
    ),
    Subject(  # headphones, a kettle, a phone …
        things="""
        the sound was: crisp, warm, crystal clear, full | tinny, muffled, distorted, harsh
        the battery was: reliable, strong, long-lasting, quick to charge | useless, dead after an hour, feeble, faulty
        the screen was: bright, sharp, gorgeous, easy to read | dim, blurred, scratched, cracked on arrival
        the buttons were: responsive, well placed, solid, easy to use | stiff, wobbly, flimsy, badly placed
        the manual was: clear, short, helpful, easy to follow | unreadable, full of errors, useless, missing
        the design was: elegant, clever, sturdy, beautiful | ugly, clumsy, cheap, impractical
        """,
        praise="""
        it worked at once and has never let me down
        setting it up took two minutes
        it saves me an hour every day
        the support team answered within minutes and solved everything
        it survived a fall without a scratch
        """,
        blame="""
        it stopped working after a week
        it crashes whenever I need it
        the charger melted on the first day
        the support team never replied
        I sent it back and am still waiting for my money
        """,
        neutral="""
        I have used it for about a month.
        It came in a plain brown box.
        I bought the grey one.
        It weighs just under a kilogram.
        It replaced one that was ten years old.
        """,
    ),
    Subject(  # a journey
        things="""
        the guide was: knowledgeable, cheerful, inspiring, patient | ignorant, late, grumpy, impossible to understand
        the train was: punctual, comfortable, clean, fast | late, overcrowded, filthy, stuck for hours
        the beach was: golden, peaceful, clean, dreamlike | littered, crowded, smelly, covered in oil
        the tour was: well organised, fascinating, fun, unforgettable | chaotic, boring, rushed, a rip-off
        the town was: charming, lively, welcoming, picturesque | shabby, hostile, dreary, dirty
        the other travellers were: good company, friendly, cheerful, helpful | drunk, rude, unfriendly, inconsiderate
        """,
        praise="""
        we saw dolphins on the very first morning
        the children still talk about it with shining eyes
        everything ran like clockwork
        I came home rested and happy
        strangers invited us to their table
        """,
        blame="""
        they lost our luggage and shrugged
        we spent a whole day in a queue
        the bus broke down twice
        nobody told us that the museum was closed
        I came home more tired than before
        """,
        neutral="""
        We travelled in early autumn.
        The journey takes about six hours.
        There were twelve people in our group.
        We changed trains in Lyon.
        It was our second trip to the coast.
        """,
    ),
    Subject(  # a shop
        things="""
        the service was: quick, friendly, thoughtful, generous | slow, hostile, careless, insulting
        the delivery was: prompt, careful, a day early, free of trouble | late, careless, incomplete, a nightmare
        the quality was: remarkable, high, superb, second to none | shoddy, pitiful, cheap, a bad joke
        the shoes were: comfortable, well made, beautiful, light as a feather | painful, badly sewn, too tight, ugly
        the website was: clear, quick, easy to use, well designed | slow, confusing, broken, full of tricks
        the choice was: huge, tempting, varied, well selected | limited, dull, poor, laughable
        """,
        praise="""
        they exchanged everything without a question
        the owner spent half an hour finding the right size for me
        my parcel arrived the next morning with a handwritten note
        they gave me a refund and an apology within a day
        the colours are even prettier than in the picture
        """,
        blame="""
        the parcel arrived open and half empty
        they sold me a broken one and kept my money
        the assistant laughed at my question
        the seams came apart on the first day
        I have written to them five times without an answer
        """,
        neutral="""
        I ordered three things in March.
        The shop is on the corner of the market square.
        It opens at nine.
        I paid by card.
        It was a present for my father.
        """,
    ),
    Subject(  # a concert, a play
        things="""
        the singer was: magnificent, warm, full of energy, spellbinding | flat, hoarse, bored, out of tune
        the band was: tight, playful, brilliant, full of joy | sloppy, listless, too loud, badly rehearsed
        the seats were: comfortable, well placed, soft, close to the stage | hard, cramped, broken, behind a pillar
        the crowd was: cheerful, warm, electric, in high spirits | aggressive, restless, rude, drunk
        the light show was: magical, dazzling, tasteful, a feast | blinding, lazy, amateurish, a mess
        """,
        praise="""
        we danced until midnight
        the last song gave me goosebumps
        they came back for three encores
        the singer thanked every musician by name
        even my grandmother got up and clapped
        """,
        blame="""
        it began an hour late without an explanation
        the sound failed again and again
        we could see nothing but heads
        they played for forty minutes and left
        the beer was warm and the toilets were disgusting
        """,
        neutral="""
        The concert was in the old town hall.
        We had seats on the left.
        It was the last evening of the tour.
        The doors opened at seven.
        They played songs from the new record.
        """,
    ),
    Subject(  # a course, a school
        things="""
        the teacher was: inspiring, patient, kind, brilliant | impatient, unprepared, cruel, boring
        the lessons were: lively, clear, fun, well prepared | dull, confusing, chaotic, endless
        the exercises were: useful, clever, well chosen, rewarding | pointless, repetitive, frustrating, full of errors
        the group was: friendly, curious, supportive, a pleasure | hostile, noisy, indifferent, far too large
        the classroom was: bright, cheerful, well equipped, quiet | gloomy, cold, dirty, falling apart
        """,
        praise="""
        I learned more in a week than in a year at school
        nobody was ever left behind
        my daughter runs there every morning
        questions were always welcome
        I finally understand what I was afraid of
        """,
        blame="""
        half of the lessons were cancelled
        nobody ever answered a question
        my son comes home in tears
        the teacher read everything aloud from a sheet
        I learned nothing that I did not know before
        """,
        neutral="""
        The course lasted for eight weeks.
        We met on Thursdays after work.
        I am a beginner.
        There is a test at the end.
        It costs the same as the one in town.
        """,
    ),
    Subject(  # people at home and at work
        things="""
        our new neighbour is: kind, generous, cheerful, always ready to help | noisy, spiteful, selfish, always angry
        my boss is: fair, encouraging, honest, full of ideas | unfair, dishonest, cold, full of contempt
        the team is: warm, brilliant, supportive, a great help | bitter, lazy, quarrelsome, a constant worry
        the flat is: sunny, cosy, quiet, beautifully kept | dark, damp, draughty, infested with mice
        the garden is: lovely, peaceful, full of flowers, a little paradise | neglected, full of rubbish, ugly, a swamp
        """,
        praise="""
        he brought us soup when we were ill
        she always finds the right words
        they surprised me with a cake on my birthday
        we laugh together every day
        everybody helps without being asked
        """,
        blame="""
        he shouts at the children for nothing
        she takes the credit for the work of others
        they broke every promise that they made
        we argue every single day
        nobody lifts a finger to help
        """,
        neutral="""
        We moved here last summer.
        I have worked there for a year.
        There are six flats in the house.
        It is close to the park.
        We meet on the stairs now and then.
        """,
        praise_verdicts="""
        I feel at home
        I am grateful every day
        I have never been so happy
        I would not change a thing
        life is good here
        """,
        blame_verdicts="""
        I cannot stand it any longer
        I dread every day
        I have never been so unhappy
        I would leave tomorrow if I could
        life is misery here
        """,
    ),
]

Clause = tuple[str, float]  # the words and their value


# --- clauses ---


def items(text: str, separator: str = "\n") -> list[str]:
    return [item.strip() for item in text.split(separator) if item.strip()]


def about_a_thing(rng: random.Random, line: str, praises: bool) -> Clause:
    """Say something about a thing, with its own words or with words that fit every thing."""
    thing, words = line.split(": ")
    kind = rng.choices(["own words", "general words", "frame"], [5, 3, 2])[0]
    if kind == "frame":
        frame, value = rng.choice(list((PRAISE_FRAMES if praises else BLAME_FRAMES).items()))
        name = thing.rsplit(" ", 1)[0]  # without its verb
        return frame.format(name), value
    value = WORD_VALUES[not praises]
    chosen = words.split("|")[not praises]
    if kind == "general words":
        chosen, value = rng.choice([pair for pair in GENERAL.items() if (pair[1] > 0.5) == praises])
    word = rng.choice(items(chosen, ","))
    stressed = " " not in word and rng.random() < 0.15
    return f"{thing} {'really ' if stressed else ''}{word}", value


def clauses(rng: random.Random, subject: Subject) -> Iterator[tuple[Clause, Clause]]:
    """Yield pairs of clauses without end, one that praises and one that blames. A thing or event comes once a round."""
    while True:
        things = items(subject.things)
        events = list(zip(items(subject.praise), items(subject.blame), strict=True))
        rng.shuffle(things)
        rng.shuffle(events)
        for thing, (praise, blame) in zip(things, events, strict=False):
            yield about_a_thing(rng, thing, True), about_a_thing(rng, thing, False)
            if rng.random() < 0.5:
                yield (praise, EVENT_VALUES[0]), (blame, EVENT_VALUES[1])


# --- sentences ---


def sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def join(rng: random.Random, first: str, second: str, agree: bool) -> str:
    """Join two clauses to a sentence."""
    if agree:
        return sentence(f"{first}, and {second}")
    return sentence(rng.choice([f"{first}, but {second}", f"although {first}, {second}", f"{first}; still, {second}"]))


def review(rng: random.Random) -> Clause:
    """Make a review: most of them agree with themselves, some change their mind."""
    subject = rng.choice(SUBJECTS)
    source = clauses(rng, subject)
    praises, wavers = rng.random() < 0.5, rng.random() < 0.3
    values: list[float] = []
    sentences: list[str] = []

    def clause(praise: bool) -> str:
        words, value = next(source)[not praise]
        values.append(value)
        return words

    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        first = praises != (wavers and rng.random() < 0.5)
        if rng.random() < 0.5:
            second = praises != (wavers and rng.random() < 0.5)
            sentences.append(join(rng, clause(first), clause(second), first == second))
        else:
            sentences.append(sentence(clause(first)))
    if rng.random() < 0.4:
        likes = values[-1] > 0.5
        sentences.append(sentence(rng.choice(items(subject.praise_verdicts if likes else subject.blame_verdicts))))
        values.append(VERDICT_VALUES[not likes])
    for neutral in rng.sample(items(subject.neutral), rng.choice([0, 0, 0, 1, 1, 2])):
        sentences.insert(rng.randrange(len(sentences) + 1) if rng.random() < 0.4 else 0, neutral)
    weights = range(1, len(values) + 1)
    return " ".join(sentences), sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def make_reviews() -> dict[str, float]:
    """Make `COUNT` different reviews and their praise."""
    rng = random.Random(SEED)
    found: dict[str, float] = {}
    while len(found) < COUNT:
        text, value = review(rng)
        if len(text.split()) > 7:  # shorter ones resemble each other too much
            found[text] = round(value, 2)
    return found


def main(file: str) -> None:
    with Path(file).open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["text", "praise"])
        writer.writerows(make_reviews().items())


if __name__ == "__main__":
    main(*sys.argv[1:])
