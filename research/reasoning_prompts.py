"""Prompts for `taper heal`, half of them word problems: what a second training of Qwen2.5-Coder-1.5B learned from.

    python research/reasoning_prompts.py > prompts.jsonl

The other half is drawn from the built-in prompts. None shares eight words in a row with a problem that policies are
measured on. The word problems have no answers, since full depth gives the outputs to learn from.
"""

from __future__ import annotations

import json
import random

from overlap import fingerprints

from taper.lab.calibration.problems import builtin_problems
from taper.lab.healing.prompts import builtin_prompts

OF_EACH = 8  # of a kind, with different names and numbers
PEOPLE = ("Ada", "Boris", "Carmen", "Dario", "Edith", "Fiona", "Gustav", "Hanna", "Ivan", "Judith", "Karim", "Lena")
# Numbers: a from 4 to 15, b from 2 to 9, c from 3 to 12, big from 120 to 400 in steps of 10.
KINDS = (
    "{name} orders {a} sandwiches at {b} dollars and a cake at {c} dollars, and adds a tip of 5 dollars. What is the "
    "bill?",
    "A jacket costs {big} dollars. {name} has saved {c} dollars in each of {a} weeks. How much is missing?",
    "{name} rents a canoe for {b} hours. The first hour costs {a} dollars and every further hour {c} dollars. What "
    "does {name} pay?",
    "A printer uses {b} sheets for each booklet. There are {big} sheets, and {name} prints {a} booklets. How many "
    "sheets are left over?",
    "{name} and {other} pick cherries. {name} picks {a} kilograms, {other} picks {b} kilograms more. They sell all of "
    "them at {c} dollars a kilogram. How much do they earn?",
    "A museum lets in {a} visitors every ten minutes. How many visitors come in {b} hours, if {c} of them leave again "
    "at once?",
    "A car needs {b} litres of petrol for 100 kilometres. How many litres does {name} need for {a}00 kilometres, and "
    "what do they cost at 2 dollars a litre?",
    "{name} plants {a} bulbs in each of {c} beds. Mice eat {b} bulbs in every bed. How many bulbs are left?",
    "A parking garage has {b} levels with {a}0 spaces each. {big} cars want to park. How many spaces stay free, or "
    "how many cars find none?",
    "{name} types {a}0 words in a minute. After {b} minutes of work, {name} deletes {c} words. How many words remain?",
    "A recipe for 4 people takes {a} potatoes and {b} carrots. How many vegetables does {name} need for 12 people?",
    "{name} is saving for a drum that costs {big} dollars. An aunt gives {a} dollars, and {name} earns {b} dollars on "
    "each of {c} days. How many dollars are still missing?",
    "A swimming pool is {a} metres long. {name} swims {b} lengths in the morning and {c} in the evening. How many "
    "metres is that?",
    "At a fair a ride costs {b} tokens and a game {c} tokens. {name} takes {a} rides and plays 3 games. How many "
    "tokens does {name} use?",
    "{name} has {big} stamps and puts {a} on each page of an album. After {b} full pages, how many stamps are not in "
    "the album yet?",
    "A lift carries {a} people at a time. How many trips does it need for {big} people?",
    "{name} knits {b} rows in an hour and a scarf has {big} rows. How many rows are left after {a} hours?",
    "A shop gets {a} crates with {c} melons each. {b} melons are soft, and the rest is sold for 3 dollars each. What "
    "does the shop take in?",
    "{name} reads {a} emails in the morning and three times as many in the afternoon, and answers {b} of them. How "
    "many are unanswered?",
    "A ferry leaves with {a} cars and {c} lorries. A car pays {b} dollars and a lorry four times as much. What do all "
    "of them pay?",
    "A marathon is 42 kilometres. {name} has run {b} kilometres in each of the first 3 hours. How far is it to the "
    "finish?",
    "{name} buys {a} tickets at {c} dollars and gets one dollar off each ticket for ordering early. What do they cost?",
    "There are {a} rows of {c} chairs in a theatre. {b} rows are reserved. How many chairs are for sale?",
    "{name} drinks {b} glasses of water a day and {other} drinks {c}. How many glasses do both drink in {a} days?",
    "A bookshop sells {a} novels on Monday, half as many on Tuesday and {c} more than on Monday on Wednesday. How many "
    "is that in all?",
    "{name} pours {big} millilitres of juice into {b} cups of {c} millilitres each. How much juice is left?",
    "A gym charges {a} dollars to join and {c} dollars a month. What does {name} pay in the first {b} months?",
    "{name} walks a dog twice a day, {a} minutes each time. How long does the dog get in {b} days, in hours and "
    "minutes?",
    "A printer prints {c} pages a minute, another one {b} pages more. How many pages do both print in {a} minutes?",
    "{name} scores {a}, {b} and {c} in three rounds, and {other} scores {c} in each of them. Who wins, and by how "
    "much?",
    "A fence needs a post every {b} metres. How many posts does a straight fence of {a} such gaps need, and what do "
    "they cost at {c} dollars each?",
    "{name} cuts a board of {big} centimetres into {b} equal shelves of {a} centimetres. How long is the rest?",
    "A farm has {a} goats and {c} ducks. How many legs is that? How many more legs do the goats have?",
    "{name} earns {c} dollars for each of {a} lawns, and spends {b} dollars on fuel for each. What remains?",
    "A choir rehearses {b} times a week for {c} weeks and {a} minutes each time. How many minutes is that?",
    "The temperature is {a} degrees at noon. It falls by {b} degrees until evening, and by {c} more at night. What is "
    "it then?",
    "{name} has twice as many shells as {other}, and {other} has {a}. They give {b} shells away. How many do they "
    "have together?",
    "An office of {a} people drinks {b} cups of coffee each a day. A pack is enough for {big} cups. How many cups are "
    "left after 2 days?",
    "{name} fills {c} jars with {a} spoons of honey each, and has {b} spoons left. How many spoons were there?",
    "A train has {b} coaches with {a}0 seats. {big} passengers have a seat. How many seats are empty?",
    "{name} bought {a} shares at {c} dollars and sold them for {b} dollars more each. How much did {name} gain, and "
    "what was the money from the sale?",
    "Each of {b} teams has {a} players. {c} players are injured, and the others play in groups of two. How many "
    "players can play?",
    "A bakery uses {b} eggs for a cake and {c} for a tray of buns. It makes {a} cakes and 4 trays. How many eggs does "
    "it use?",
    "{name} has {big} dollars and buys {a} pots of paint at {c} dollars. With the rest, {name} buys brushes at "
    "{b} dollars. How many brushes?",
    "A clock loses {b} minutes a day. How many minutes is it behind after {a} days, if {name} once sets it forward by "
    "{c} minutes?",
)
ENDINGS = (
    "",
    "Show your work.",
    "Think step by step.",
    "Explain how you get the answer.",
    "Describe each step.",
    "Work it out in steps, then give the answer.",
    "Give the calculation and the result.",
    "What is the answer, and why?",
)


def reasoning_prompts() -> list[str]:
    """Word problems and as many of the built-in prompts, always the same, in mixed order."""
    rng, problems = random.Random(0), []
    for kind in KINDS:
        for ending in rng.sample(ENDINGS, OF_EACH):
            name, other = rng.sample(PEOPLE, 2)
            numbers = {"a": rng.randint(4, 15), "b": rng.randint(2, 9), "c": rng.randint(3, 12)}
            problem = kind.format(name=name, other=other, big=10 * rng.randint(12, 40), **numbers)
            problems.append(f"{problem} {ending}".strip())
    measured = {run for level in builtin_problems() for problem in level for run in fingerprints(problem.prompt)}
    others = [prompt for prompt in builtin_prompts() if not measured & set(fingerprints(prompt))]
    prompts = [*problems, *rng.sample(others, len(problems))]
    rng.shuffle(prompts)
    return prompts


if __name__ == "__main__":
    for prompt in reasoning_prompts():
        print(json.dumps({"prompt": prompt}))
