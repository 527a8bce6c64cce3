"""The same facts in many forms: prose, tables, JSON lines, logs, key-value lists, code, transcripts, Chinese, Arabic. No model.

Two sets by wording, names, kinds of values and seed: ``develop``, and ``sealed``, which is run once, at the end. Chunks of dense forms are
of that form throughout, with dozens of similar facts; prose stands between facts where the form is prose.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, cycle, product
from string import Formatter
from typing import Any

from facts_tasks import Question, passages
from facts_words import ARABIC, CHINESE, ENGLISH, Words

SETS = ("develop", "sealed")
ASKS = ("one", "joined", "comparison", "one", "count")
"""What questions ask, in turn."""
SHAPES = (
    (16, 64),
    (4, 300),
    (8, 160),
    (12, 100),
    (6, 400),
    (16, 160),
    (40, 64),
    (4, 650),
    (24, 160),
    (10, 400),
    (5, 850),
    (40, 160),
)
"""Chunks and their tokens, in turn; their number and that of the asks have no common divisor, so all pairs come."""
ASKED = {"one": "code", "joined": "keeper", "comparison": "amount", "count": "state"}
OPTIONS = 3
COUNTED = 3
NUMBERS = {
    word: number
    for number, words in enumerate(
        (
            "none zero 零",
            "one 一 واحد واحدة",
            "two both 二 两 اثنان اثنتان",
            "three all 三 ثلاث ثلاثة",
            "four 四 أربع أربعة",
        )
    )
    for word in words.split()
}
"""Words for small numbers."""
LONGEST_SENTENCE = 45
PROSE_TOKENS_PER_FACT = 120

Size = Callable[[str], int]
"""Counts the tokens of a text."""


@dataclass(frozen=True)
class Record:
    """What is known of a site or a person."""

    kind: str
    name: str
    fields: dict[str, str]


@dataclass(frozen=True)
class Fact:
    """A field of a record."""

    record: Record
    field: str

    @property
    def value(self) -> str:
        """What the field holds."""
        return self.record.fields[self.field]


LINES: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "develop": {
        "logs": {
            "site": (
                "{time} INFO  registry: {k[site]}='{name}' {k[code]}={code} {k[amount]}={amount} {k[state]}={state} {k[keeper]}='{keeper}'",
                "{time} INFO  sync: updated '{name}': {k[code]}={code}, {k[amount]}={amount}, {k[state]}={state}, {k[keeper]}='{keeper}'",
            ),
            "person": (
                "{time} INFO  staff: {k[person]}='{name}' {k[badge]}={badge}",
                "{time} INFO  auth: login of '{name}' ok, {k[badge]}={badge}",
            ),
            "noise": (
                "{time} DEBUG scheduler: job {n} done in {n} ms",
                "{time} WARN  cache: {n} entries expired",
                "{time} DEBUG http: GET /health 200 in {n} us",
                "{time} ERROR mailer: retry {n} of a message failed",
            ),
        },
        "records": {
            "site": (
                "{k[site]}: {name}\n{l[code]}: {code}\n{l[amount]}: {amount}\n{l[state]}: {state}\n{l[keeper]}: {keeper}\n",
            ),
            "person": ("{l[person]}: {name}\n{l[badge]}: {badge}\n",),
            "noise": ("note: page {n} was checked\n",),
        },
        "code": {
            "site": (
                '# {name} is {state}; its {l[keeper]} is {keeper}\nSITES["{name}"] = Site({k[code]}="{code}", {k[amount]}={amount})',
                'add_site("{name}", {k[code]}="{code}", {k[amount]}={amount}, {k[state]}="{state}")  # {l[keeper]}: {keeper}',
            ),
            "person": (
                'STAFF["{name}"] = "{badge}"  # {l[badge]}',
                'add_person("{name}", {k[badge]}="{badge}")',
            ),
            "noise": (
                "def check_{n}(items):\n    # keep the order of the list\n    return [item for item in items if item.size > {n}]\n",
                "if not READY:\n    raise RuntimeError('step {n} is missing')",
                "for attempt in range({n}):\n    wait(attempt)  # seconds",
            ),
        },
    },
    "sealed": {
        "logs": {
            "site": (
                "harbour-{n} tracker[{n}] {time}Z {name}; {l[code]} {code}; {l[amount]} {amount}; {l[state]} {state}; {l[keeper]} {keeper}",
                "harbour-{n} radar[{n}] {time}Z seen: {name} ({l[keeper]} {keeper}, {l[code]} {code}), {state}, {amount} {l[amount]}",
            ),
            "person": (
                "harbour-{n} crewd[{n}] {time}Z signed on: {name}; {l[badge]} {badge}",
                "harbour-{n} gate[{n}] {time}Z {l[badge]} {badge} shown by {name}",
            ),
            "noise": (
                "harbour-{n} ntpd[{n}] {time}Z clock stepped by {n} microseconds",
                "harbour-{n} kernel {time}Z eth{n}: link is up",
                "harbour-{n} cron[{n}] {time}Z rotating old files",
            ),
        },
        "records": {
            "site": (
                "* {name}\n    {l[code]} = {code}\n    {l[keeper]} = {keeper}\n    {l[state]} = {state}\n    {l[amount]} = {amount}",
            ),
            "person": ("* {name}\n    {l[badge]} = {badge}",),
            "noise": ("* see also sheet {n}",),
        },
        "code": {
            "site": (
                "// {l[keeper]} of {name}: {keeper}\n"
                'fleet.push({{ name: "{name}", {c[code]}: "{code}", {c[amount]}: {amount}, {c[state]}: "{state}" }});',
                'const v{n} = new Vessel("{name}", "{code}"); // {l[code]}\n'
                'v{n}.{c[amount]} = {amount}; v{n}.{c[state]} = "{state}"; v{n}.{c[keeper]} = "{keeper}";',
            ),
            "person": (
                'crew.set("{name}", "{badge}"); /* {l[badge]} */',
                '/* {name} */ issue("{badge}", "{c[badge]}", "{name}"); ',
            ),
            "noise": (
                "function plot{n}(points) {{\n  // smaller first\n  return points.sort((a, b) => a.x - b.x);\n}}",
                "while (queue.length > {n}) queue.shift();",
                "export const LIMIT_{n} = {n} * 1024; // bytes",
            ),
        },
    },
}
"""Lines of dense forms: ``k`` are labels in snake case, ``c`` in camel case, ``l`` as they are; ``n`` is any small number."""


def keyed(label: str) -> str:
    """A label as a key in snake case."""
    return label.replace(" ", "_")


def camel(label: str) -> str:
    """A label as a key in camel case."""
    first, *rest = label.split()
    return first + "".join(word.capitalize() for word in rest)


@dataclass
class World:
    """Names, values and labels of one prompt; no name and no value comes twice."""

    draw: random.Random
    words: Words
    which: str
    asked: str
    labels: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        draw, words = self.draw, self.words
        self.labels = {key: draw.choice(labels) for key, labels in words.labels.items()}
        self._makers = {key: draw.choice(makers) for key, makers in words.values.items()}
        self._sites = self._mixed(words.name, words.first, words.second)
        self._people = self._mixed(words.person, words.given, words.family)
        self._taken: set[str] = set()
        self._keepers: list[Record] = []
        self.style = draw.randrange(1000)
        # The asked field comes first: a small model reads the cell beside a name, and none of the others.
        others = [key for key in ASKED.values() if key != self.asked]
        self.columns = [self.asked, *draw.sample(others, len(others))]

    def _mixed(self, text: str, first: tuple[str, ...], second: tuple[str, ...]) -> list[str]:
        names = [text.format(*pair) for pair in product(first, second)]
        self.draw.shuffle(names)
        return names

    def _value(self, key: str) -> str:
        while True:
            value = self._makers[key](self.draw)
            if value not in self._taken:
                self._taken.add(value)
                return value

    def site(self, state: str | None = None) -> Record:
        """Make up a site; its keeper waits to be told of."""
        keeper = Record("person", self._people.pop(), {"badge": self._value("badge")})
        self._keepers.append(keeper)
        fields = {
            "code": self._value("code"),
            "amount": self._value("amount"),
            "state": state or self.draw.choice(self.words.states),
            "keeper": keeper.name,
        }
        return Record("site", self._sites.pop(), fields)

    def keeper(self) -> Record:
        """The keeper of the site made last."""
        return self._keepers.pop()

    def other(self) -> Fact:
        """A fact that no question is about, of the asked kind more often than not."""
        if self._keepers and self.draw.random() < (0.5 if self.asked == "keeper" else 0.3):
            return Fact(self._keepers.pop(self.draw.randrange(len(self._keepers))), "badge")
        key = self.asked if self.draw.random() < 2 / 3 else self.draw.choice(self.columns)
        return Fact(self.site(), key)

    def told(self, fact: Fact, templates: dict[str, tuple[str, ...]]) -> str:
        """Tell a fact by one of the templates."""
        text = self.draw.choice(templates[fact.field])
        return text.format(
            name=fact.record.name,
            value=fact.value,
            label=self.labels[fact.field],
        )

    def filled(self, text: str, record: Record | None = None) -> str:
        """Fill a line of :data:`LINES`."""
        number, draw = str(self.draw.randint(2, 97)), self.draw
        time = f"{draw.randint(10, 23)}:{draw.randint(10, 59)}:{draw.randint(10, 59)}"
        found = {"time": time, "n": number, "l": self.labels}
        found["k"] = {key: keyed(label) for key, label in self.labels.items()}
        found["c"] = {key: camel(label) for key, label in self.labels.items()}
        if record is not None:
            found |= {"name": record.name, **record.fields}
        return text.format(**found)


# -- dense forms: a whole record in each place ------------------------------------------------------


def lines(form: str) -> Callable[[World, list[Record]], str]:
    """Lines by the templates of a form, in between those that tell nothing."""

    def render(world: World, records: list[Record]) -> str:
        texts = LINES[world.which][form]
        found = []
        for record in records:
            found.append(world.filled(world.draw.choice(texts[record.kind]), record))
            if world.draw.random() < 0.2:
                found.append(world.filled(world.draw.choice(texts["noise"])))
        return "\n".join(found)

    return render


def tables(world: World, records: list[Record]) -> str:
    """A Markdown table of sites, one of people, or both."""
    found = []
    for kind, keys in (("site", world.columns), ("person", ["badge"])):
        rows = [[r.name, *(r.fields[key] for key in keys)] for r in records if r.kind == kind]
        if rows:
            head = [world.labels[kind], *(world.labels[key] for key in keys)]
            ruled = [head, ["---"] * len(head), *rows]
            ends, mark = (("| ", " |"), " | ") if world.which == "develop" else (("|", "|"), "|")
            found.append("\n".join(f"{ends[0]}{mark.join(row)}{ends[1]}" for row in ruled))
    return "\n\n".join(found)


def json_lines(world: World, records: list[Record]) -> str:
    """JSON, a record a line: flat in one set, nested in the other."""
    found = []
    for record in records:
        given: dict[str, Any] = {
            world.labels[key]: record.fields[key]
            for key in [*world.columns, "badge"]
            if key in record.fields
        }
        if world.which == "develop":
            flat = {world.labels[record.kind]: record.name} | given
            found.append(
                json.dumps({keyed(k): int(v) if v.isdigit() else v for k, v in flat.items()})
            )
        else:
            inner = {camel(k): v for k, v in given.items()}
            found.append(json.dumps({record.name: inner}, separators=(",", ":")))
    return "\n".join(found)


Dense = Callable[[World, list[Record]], str]
DENSE: dict[str, Dense] = {
    "tables": tables,
    "json": json_lines,
    "logs": lines("logs"),
    "records": lines("records"),
    "code": lines("code"),
}


def dense(form: str) -> Callable[[World, Size, int, list[Fact]], str]:
    """A chunk of records: the given facts' and as many others as there is room for."""

    def chunk(world: World, size: Size, tokens: int, facts: list[Fact]) -> str:
        records = [fact.record for fact in facts]
        text = ""
        while not records or size(text) < tokens:
            kinds = {record.kind for record in records}
            new = world.other().record
            if kinds and tokens < 200 and new.kind not in kinds and form == "tables":
                new = world.site() if "site" in kinds else new
            records.insert(world.draw.randint(0, len(records)), new)
            text = _rendered(world, form, records)
        return text

    return chunk


def _rendered(world: World, form: str, records: list[Record]) -> str:
    """Render the same records always alike."""
    kept, world.draw = world.draw, random.Random(f"{world.style} {records[0].name} {form}")
    try:
        return DENSE[form](world, records)
    finally:
        world.draw = kept


# -- prose: a field in each sentence ----------------------------------------------------------------


def spoken(text: str) -> str:
    """A text as it is heard: small letters, and no punctuation."""
    text = re.sub(r"(\d)\.(\d)", r"\1 point \2", text.lower())
    return " ".join(re.sub(r"[^\w\s]|_", " ", text).split())


def inside(world: World, sentence: str, aside: str) -> str:
    """Put an aside into the middle of a sentence."""
    words = sentence.split()
    at = world.draw.randint(len(words) // 3, max(len(words) // 3, 2 * len(words) // 3))
    return f"{' '.join(words[:at]).rstrip(',;:.')}, {aside}, {' '.join(words[at:])}"


def sentences(world: World) -> Iterator[str]:
    """Sentences without end, in the language of the words: of passages, or made up."""
    if world.words.hay:
        while True:
            text = world.draw.choice(world.words.hay)
            slots = {name for _, name, _, _ in Formatter().parse(text) if name}
            yield text.format(**{s: world.draw.choice(world.words.slots[s]) for s in slots})
    own = list(dict.fromkeys(passages()))[SETS.index(world.which) :: 2]
    for text in cycle(world.draw.sample(own, len(own))):
        found = re.split(r"(?<=[.!?]) ", text)
        yield from (s for s in found if 6 <= len(s.split()) <= LONGEST_SENTENCE)


def prose(form: str) -> Callable[[World, Size, int, list[Fact]], str]:
    """A chunk of sentences with the given facts and others."""

    def chunk(world: World, size: Size, tokens: int, facts: list[Fact]) -> str:
        words, draw, joint = world.words, world.draw, " " if " " in world.words.name else ""
        heard = spoken if form == "transcripts" else str
        is_dense = form in ("transcripts", "chinese", "arabic")
        wanted = max(1, tokens // (PROSE_TOKENS_PER_FACT // (2 if is_dense else 1)))
        facts = facts + [world.other() for _ in range(wanted - len(facts))]
        hay, found = sentences(world), []
        for fact in facts:
            is_inside = form == "inside" or (form == "wrapped" and draw.random() < 0.5)
            if is_inside:
                sentence = next(s for s in hay if len(s.split()) >= 10)
                found.append(inside(world, sentence, world.told(fact, words.aside)))
            else:
                found.append(world.told(fact, words.said if form == "transcripts" else words.told))
        used = size(heard(joint.join(found)))
        while used < tokens:
            is_talk = form == "transcripts" and draw.random() < 0.4
            found.append(draw.choice(words.small_talk) if is_talk else next(hay))
            used += size(joint + heard(found[-1]))
        draw.shuffle(found)
        text = heard(joint.join(found))
        return wrapped(text) if form == "wrapped" else text

    return chunk


def wrapped(text: str, width: int = 72) -> str:
    """Break lines at 72 columns; long words in small letters with a hyphen."""
    done, line = [], ""
    for word in text.split():
        if len(line) + len(word) + (1 if line else 0) <= width:
            line = f"{line} {word}".strip()
            continue
        room = width - len(line) - 2
        if re.fullmatch(r"[a-z]{9,}", word) and room >= 3:
            cut = min(room, len(word) - 3)
            line, word = f"{line} {word[:cut]}-", word[cut:]
        done.append(line)
        line = word
    return "\n".join([*done, line])


Chunk = Callable[[World, Size, int, list[Fact]], str]
PROSE = ("between", "inside", "transcripts", "wrapped")
MIXED = ("between", "inside", "transcripts", *DENSE)


def mixed(world: World, size: Size, tokens: int, facts: list[Fact]) -> str:
    """A chunk of any English form."""
    return FORMS[world.draw.choice(MIXED)](world, size, tokens, facts)


FORMS: dict[str, Chunk] = {
    "between": prose("between"),
    "inside": prose("inside"),
    **{name: dense(name) for name in DENSE},
    "transcripts": prose("transcripts"),
    "wrapped": prose("wrapped"),
    "chinese": prose("chinese"),
    "arabic": prose("arabic"),
    "mixtures": mixed,
}


# -- questions --------------------------------------------------------------------------------------


def words_of(form: str, which: str) -> Words:
    """The words of a set in the form's language."""
    return {"chinese": CHINESE, "arabic": ARABIC}.get(form, ENGLISH)[which]


def task_of(form: str, which: str) -> str:
    """The task of a form and a set, as records name it."""
    return f"forms/{which}/{form}"


def plain(text: str) -> str:
    """A text by its letters and digits alone, for comparisons."""
    return " ".join(re.sub(r"[\W_]+", " ", spoken(text)).split())


def times_in(needle: str, text: str) -> int:
    """How often a plain text holds a word or number, not as a part of another."""
    return len(re.findall(rf"(?<![0-9a-z]){re.escape(plain(needle))}(?![0-9a-z])", text))


def _question(
    form: str, which: str, number: int, size: Size, draw: random.Random
) -> tuple[Question, bool]:
    """A question, and whether all that it is about stands in its prompt once."""
    ask, (chunks, tokens) = ASKS[number % len(ASKS)], SHAPES[number % len(SHAPES)]
    words = words_of(form, which)
    world = World(draw, words, which, ASKED[ask])
    options: list[str] = []
    if ask == "comparison":
        sites = [world.site() for _ in range(OPTIONS)]
        best = max(sites, key=lambda s: float(s.fields["amount"]))
        options, golds = [s.name for s in sites], (best.name,)
    elif ask == "count":
        right = draw.randint(1, COUNTED)
        states = [words.states[0]] * right + [words.states[1]] * (COUNTED - right)
        draw.shuffle(states)
        sites = [world.site(state) for state in states]
        options, golds = [s.name for s in sites], (str(right),)
    else:
        sites = [world.site()]
        golds = (sites[0].fields["code"],)
    facts = [Fact(site, ASKED[ask]) for site in sites]
    if ask == "joined":
        keeper = world.keeper()
        facts.append(Fact(keeper, "badge"))
        golds = (keeper.fields["badge"],)
    homes = draw.sample(range(chunks), len(facts))
    texts = tuple(
        FORMS[form](
            world,
            size,
            tokens,
            [fact for fact, home in zip(facts, homes, strict=True) if home == index],
        )
        for index in range(chunks)
    )
    before, between = words.listed
    labels = world.labels | {"state": words.states[0]}
    asked = draw.choice(words.asks[ask]).format(
        **labels,
        name=sites[0].name,
        names=between.join(f"{before}{name}" for name in options),
    )
    within = {"comparison": words.choose, "count": words.number}.get(ask, words.within)
    question = Question(
        ask,
        number,
        texts,
        f"{within}\n{words.question}{asked}",
        golds,
        {"comparison": "choice", "count": "number"}.get(ask, "exact"),
        is_multi_hop=ask != "one",
        max_tokens=48 if ask == "joined" else 24,
        options=tuple(options),
        facts=tuple((f.record.name, f.field, f.value) for f in facts),
    )
    text = plain("\n".join(texts))
    once = [site.name for site in sites] + [
        f.value for f in facts if f.field in ("code", "badge", "amount")
    ]
    is_told = times_in(facts[-1].record.name, text) == (2 if ask == "joined" else 1)
    return question, is_told and all(times_in(each, text) == 1 for each in once)


def question(form: str, which: str, number: int, size: Size) -> Question:
    """A question of a form and a set; the same for the same numbers and tokenizer."""
    for attempt in count():
        made, is_clear = _question(
            form, which, number, size, random.Random(f"{which} {form} {number} {attempt}")
        )
        if is_clear:
            return replace(made, form=form)
    raise AssertionError


def of_task(task: str, number: int, size: Size) -> Question:
    """A question of a task by :func:`task_of`."""
    _, which, form = task.split("/")
    return question(form, which, number, size)


def tokens_of(number: int) -> int:
    """About how many tokens a question's chunks have."""
    chunks, tokens = SHAPES[number % len(SHAPES)]
    return chunks * tokens


def is_right(kind: str, text: str, golds: tuple[str, ...], options: tuple[str, ...]) -> bool:
    """Whether an answer is right: ``exact``, ``choice`` or ``number``, as :class:`~facts_tasks.Question` has them."""
    said = plain(text)
    if kind == "choice":
        places = {name: said.find(plain(name)) for name in options}
        named = [name for name in options if places[name] >= 0]
        return bool(named) and min(named, key=places.__getitem__) in golds
    if kind == "number":
        words = re.findall(r"\d+|[零一二两三四]|[a-z]+|[\u0621-\u064a]+", said)
        numbers = [NUMBERS.get(w, w) for w in words if w in NUMBERS or w.isdigit()]
        return bool(numbers) and str(int(numbers[0])) in golds
    return any(times_in(gold, said) for gold in golds)
