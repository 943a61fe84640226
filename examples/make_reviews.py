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

COUNT = 1000
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
        events: a line per beginning: "the receptionist: ends that praise | ends that blame". Praise and blame begin
            alike, so that a reward model learns from their ends.
        praise_verdicts, blame_verdicts: a closing clause per line.
        neutral: a sentence per line, which praises and blames nothing.
    """

    things: str
    events: str
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
        events="""
        the receptionist: gave us a better room, remembered our names, smiled and helped at once | \
            gave our room away, forgot our booking, sighed and ignored us
        at night we: slept like children, heard nothing but the sea, felt perfectly safe | \
            hardly slept, heard every door, felt quite unsafe
        the owner: welcomed us with tea and cake, lent us two bicycles, thought of every detail | \
            shouted at us on the stairs, charged us twice, refused to apologise
        in our bathroom there were: fresh flowers, soft warm towels, little presents for the children | \
            dead flies, wet dirty towels, hairs in the sink
        the lift: worked quietly, took us straight to the pool, was a help to my mother | \
            broke down every day, stank of smoke, trapped my mother for an hour
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
        events="""
        the chef: came out to greet us, knew exactly what he was doing, cooked with love | \
            came out to shout at us, had no idea what he was doing, burned everything
        my steak: melted on the tongue, came just as I like it, was the best in years | \
            tasted of old fat, came back raw twice, was the toughest in years
        they: found us a quiet table, brought everything at once, gave us dessert for free | \
            forgot our table, brought the wrong order, charged us for water
        after the meal I: felt wonderful, ordered another portion, thanked the cook | \
            felt sick, went home hungry, asked for my money back
        the children: got their own little menu, ate with delight, did not want to leave | \
            got cold chips, left their plates full, wanted to leave at once
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
        events="""
        after an hour I: was on the edge of my seat, had tears of joy in my eyes, never wanted it to stop | \
            was looking at my watch, had a headache, only wanted it to stop
        the audience: laughed and cheered, applauded for minutes, left with happy faces | \
            coughed and yawned, walked out in rows, left with long faces
        the leading actress: lights up every scene, breaks your heart, deserves every prize | \
            ruins every scene, cannot act at all, mumbles every line
        the jokes: work every time, are clever and kind, made me laugh out loud | \
            fall flat every time, are stupid and cruel, made me cringe
        the director: tells the story with love, trusts the audience, has made a masterpiece | \
            has lost the story, insults the audience, has made a mess
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
        events="""
        the author: writes with warmth and humour, knows the subject well, makes every page count | \
            writes without life or humour, knows nothing of the subject, wastes every page
        I: read it in a single night, gave it to all my friends, was sorry when it ended | \
            gave it up after fifty pages, gave it to the charity shop, was glad when it ended
        every chapter: taught me something new, made me smile, is better than the one before | \
            repeats the one before, made me yawn, is worse than the one before
        the heroine: won my heart, is brave and funny, grows with every page | \
            got on my nerves, is vain and silly, never becomes alive
        my reading group: adored it, talked about it for hours, chose it as the best of the year | \
            loathed it, had nothing to say about it, voted it the worst of the year
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
        events="""
        it: worked at once, has never let me down, does more than it promises | \
            never worked, has let me down again and again, does nothing that it promises
        the support team: answered within minutes, solved the problem kindly, sent a new one for free | \
            never answered, made the problem worse, blamed me for everything
        setting it up: took two minutes, was child's play, was a pleasure | \
            took two days, was a nightmare, was pure frustration
        when it fell down, it: survived without a scratch, kept on playing, stayed as good as new | \
            broke into pieces, stopped at once, was ready for the bin
        after a month it: still looks like new, saves me an hour every day, has become my favourite tool | \
            already looks worn, wastes an hour every day, has become expensive rubbish
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
        events="""
        our luggage: arrived before us, was carried for us, was handled with care | \
            never arrived, was stolen from the bus, was thrown about
        the children: had shining eyes, made new friends, want to go back next year | \
            were bored to tears, were sick all day, never want to go back
        on the last day we: saw dolphins, were invited to a wedding, danced on the beach | \
            saw nothing but rain, were robbed at the station, argued on the beach
        the driver: told wonderful stories, drove with great care, waited for us with a smile | \
            told nasty jokes, drove like a madman, left without us
        I came home: rested and happy, full of good memories, in love with the country | \
            tired and angry, full of regret, sick of the country
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
        events="""
        the assistant: took all the time in the world, found the right size for me, gave me honest advice | \
            had no time at all, laughed at my question, gave me false advice
        my parcel: arrived a day early, was packed with care, held a handwritten note | \
            arrived a month late, was torn and wet, held the wrong things
        when I complained, they: apologised at once, gave me a full refund, sent a new one the same day | \
            hung up at once, refused a refund, called me a liar
        after a month the coat: still looks like new, keeps me warm and dry, wins me compliments | \
            already has holes, lets in wind and rain, has lost its colour
        the colours: are even prettier than in the picture, glow in the sun, go well with everything | \
            are nothing like the picture, run in the wash, look cheap in daylight
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
        events="""
        we: danced until midnight, sang along with all our hearts, got the seats of our dreams | \
            left in the break, stood in the rain for an hour, saw nothing but heads
        the last song: gave me goosebumps, moved me to tears, was worth the journey alone | \
            gave me a headache, was drowned in noise, was cut off in the middle
        the musicians: came back for more, played with all their hearts, smiled at each other | \
            went home early, played without any heart, quarrelled on stage
        at the bar they: served us quickly, charged fair prices, joked with everybody | \
            ignored us for ages, charged absurd prices, insulted everybody
        my grandmother: clapped until the end, felt young again, talks of nothing else | \
            covered her ears, felt ill, wants her money back
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
        events="""
        my daughter: runs there every morning, has found good friends, grows with every lesson | \
            cries there every morning, has been bullied, falls behind with every lesson
        after eight weeks I: understood it at last, spoke with confidence, had a job in the field | \
            understood even less, spoke not a word, had only lost my money
        questions: were always welcome, got patient answers, led to lively talks | \
            were never welcome, got angry answers, led to mockery
        the head of the school: listens to everybody, solves problems quietly, knows every child | \
            listens to nobody, causes most problems, knows no child
        the homework: helped me a lot, was quick and fun, made me curious | \
            helped nobody, was long and dull, made me despair
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
        events="""
        my colleague: shares the credit, always finds kind words, cheers everybody up | \
            steals the credit, always finds fault, drags everybody down
        the landlord: repaired it the same day, keeps every promise, lowered the rent | \
            never repaired anything, breaks every promise, raised the rent twice
        the people upstairs: brought us soup, play with our children, water our plants | \
            bang on the floor, shout at our children, steal our post
        every morning we: laugh together, wake up to birdsong, look forward to the day | \
            argue, wake up to drilling, dread the day
        when I was ill, they: took care of me, sent me flowers, did my work without a word | \
            took my desk, sent me angry letters, cut my pay without a word
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
    thing, _ = line.split(": ")
    kind = rng.choices(["own words", "general words", "frame"], [5, 3, 2])[0]
    if kind == "frame":
        frame, value = rng.choice(list((PRAISE_FRAMES if praises else BLAME_FRAMES).items()))
        return frame.format(thing.rsplit(" ", 1)[0]), value  # the thing without its verb
    if kind == "general words":
        words, value = rng.choice([pair for pair in GENERAL.items() if (pair[1] > 0.5) == praises])
        word = rng.choice(items(words, ","))
    else:
        word, value = choose_end(rng, line, praises), WORD_VALUES[not praises]
    stressed = " " not in word and rng.random() < 0.15
    return f"{thing} {'really ' if stressed else ''}{word}", value


def about_an_event(rng: random.Random, line: str, praises: bool) -> Clause:
    return f"{line.split(': ')[0]} {choose_end(rng, line, praises)}", EVENT_VALUES[not praises]


def choose_end(rng: random.Random, line: str, praises: bool) -> str:
    """Choose one of the words after "beginning:", left of the | for praise and right of it for blame."""
    praise, blame = line.split(": ")[1].split("|")
    return rng.choice(items(praise if praises else blame, ","))


def clauses(rng: random.Random, subject: Subject) -> Iterator[tuple[Clause, Clause]]:
    """Yield pairs of clauses, one that praises and one that blames. Each thing and event comes once."""
    about = [(about_a_thing, line) for line in items(subject.things)]
    about += [(about_an_event, line) for line in items(subject.events)]
    rng.shuffle(about)
    for say, line in about:
        yield say(rng, line, True), say(rng, line, False)


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
