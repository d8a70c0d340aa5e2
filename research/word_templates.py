"""Word problems of several steps with letters for their numbers, each with what it comes to.

Many different ones, because problems of one kind stand and fall together: a layer without which a model no longer
gives change may matter for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

# Numbers: a, c 3 to 12, b 2 to 9; p more than a * b + 2 * c.
Template = tuple[str, Callable[[int, int, int, int], int]]

SEVERAL_STEPS: tuple[Template, ...] = (
    # Money
    (
        "{name} buys {a} {things} at {b} dollars each and {c} pens at 2 dollars each, and pays with a {p} dollar note. "
        "How many dollars does {name} get back?",
        lambda a, b, c, p: p - a * b - 2 * c,
    ),
    (
        "{name} saves {a} dollars a week for {b} weeks. {other} saves {c} dollars more than that in the same time. How "
        "many dollars do they have together?",
        lambda a, b, c, p: 2 * a * b + c,
    ),
    (
        "A cinema ticket costs {c} dollars for a child and twice as much for an adult, plus 1 dollar for each ticket "
        "sold online. A family of 2 adults and 2 children buys online. How many dollars do they pay?",
        lambda a, b, c, p: 6 * c + 4,
    ),
    (
        "{name} earns {c} dollars an hour. Last week {name} worked {a} hours on each of 5 days, and this week {b} "
        "hours fewer in all. How many dollars did {name} earn in the two weeks?",
        lambda a, b, c, p: c * (10 * a - b),
    ),
    (
        "A shop sells a chair for {a}0 dollars and a table for three times that price. {name} buys {b} chairs and one "
        "table. How many dollars is that?",
        lambda a, b, c, p: 10 * a * (b + 3),
    ),
    (
        "{name} takes the bus, which costs 2 dollars each way, to a shop and back, and buys {a} notebooks for {b} "
        "dollars each there. How many dollars does {name} spend?",
        lambda a, b, c, p: a * b + 4,
    ),
    (
        "A baker makes {a} trays of {b} rolls. Each roll sells for 2 dollars, and the flour cost {c} dollars. How many "
        "dollars does the baker keep if every roll is sold?",
        lambda a, b, c, p: 2 * a * b - c,
    ),
    (
        "A phone plan costs {a}0 dollars a month, plus 2 dollars for each extra gigabyte. {name} used {c} extra "
        "gigabytes in January and {b} in February. What did the two months cost together, in dollars?",
        lambda a, b, c, p: 20 * a + 2 * (b + c),
    ),
    (
        "{name} sells lemonade at {b} dollars a cup. On Saturday {name} sold {a} cups and on Sunday {c} more than on "
        "Saturday. How many dollars did {name} take in?",
        lambda a, b, c, p: b * (2 * a + c),
    ),
    (
        "A coat cost {p} dollars. Its price was lowered by {a} dollars, and a week later by {b} dollars more. {name} "
        "bought 2 of them. How many dollars did {name} pay?",
        lambda a, b, c, p: 2 * (p - a - b),
    ),
    (
        "{name} and {other} share the cost of a boat that rents for {a}0 dollars an hour. They keep it for {b} hours "
        "and pay half each. How many dollars does each of them pay?",
        lambda a, b, c, p: 5 * a * b,
    ),
    (
        "A gardener is paid {a} dollars for each small hedge and twice as much for each large one. How many dollars "
        "does the gardener get for {b} small and {c} large hedges?",
        lambda a, b, c, p: a * b + 2 * a * c,
    ),
    (
        "{name} puts {b} dollars into a jar every day for {a} days, takes out 3 dollars for a drink, and adds {c} "
        "dollars from an aunt. How many dollars are in the jar?",
        lambda a, b, c, p: a * b - 3 + c,
    ),
    (
        "A taxi costs 4 dollars to start with and {b} dollars for each mile. {name} rides {a} miles, and gives the "
        "driver {c} dollars extra. How many dollars does {name} pay in all?",
        lambda a, b, c, p: 4 + a * b + c,
    ),
    (
        "Pencils come in boxes of 12, and a box costs {b} dollars. A school needs {a} dozen pencils for one class and "
        "{c} dozen for another. How many dollars does it pay?",
        lambda a, b, c, p: b * (a + c),
    ),
    (
        "{name} owes {other} {p} dollars, and pays back {b} dollars a week. How many dollars does {name} still owe "
        "after {a} weeks?",
        lambda a, b, c, p: p - a * b,
    ),
    # Things
    (
        "A farmer has {a} rows of {b} trees. Each tree gives {c} baskets of apples, and {b} baskets are sold. How many "
        "baskets are left?",
        lambda a, b, c, p: a * b * c - b,
    ),
    (
        "{name} has {a} {things}, {other} has {b} more than {name}, and their sister has twice as many as {other}. How "
        "many {things} do the three have together?",
        lambda a, b, c, p: a + 3 * (a + b),
    ),
    (
        "There are {a} red {things} in a bag, {b} times as many blue ones, and {c} green ones. How many {things} are "
        "in the bag?",
        lambda a, b, c, p: a + a * b + c,
    ),
    (
        "A library has {a} shelves with {c}0 books on each. {name} borrows {b} books and brings back 2 of them. How "
        "many books are in the library now?",
        lambda a, b, c, p: 10 * a * c - b + 2,
    ),
    (
        "{name} picks {a} baskets of {c} plums. {b} plums are bad and are thrown away, and {other} brings 5 good ones. "
        "How many good plums are there?",
        lambda a, b, c, p: a * c - b + 5,
    ),
    (
        "A box holds 24 bottles. {name} fills {a} boxes, and {b} bottles do not fit. {c} of all the bottles break. How "
        "many whole bottles are there?",
        lambda a, b, c, p: 24 * a + b - c,
    ),
    (
        "{name} had {p} {things}. {name} gave {a} of them to each of 3 friends, and then found {b} new ones. How many "
        "{things} does {name} have now?",
        lambda a, b, c, p: p - 3 * a + b,
    ),
    (
        "A florist ties bunches of {b} roses and {a} tulips. How many flowers does the florist need for {c} bunches?",
        lambda a, b, c, p: c * (a + b),
    ),
    (
        "A class of {a} girls and {c} boys makes {b} paper stars each. The teacher makes 10 more. How many stars are "
        "there?",
        lambda a, b, c, p: b * (a + c) + 10,
    ),
    (
        "A truck carries {a}0 crates. At the first stop {b} crates are taken off, at the second stop twice as many. "
        "How many crates are still on the truck?",
        lambda a, b, c, p: 10 * a - 3 * b,
    ),
    (
        "{name} bakes {a} dozen cookies. The family eats {b} of them, and {c} go to the neighbours. How many cookies "
        "are left?",
        lambda a, b, c, p: 12 * a - b - c,
    ),
    (
        "A hen lays {b} eggs a week. {name} has {a} hens. How many eggs do they lay in {c} weeks?",
        lambda a, b, c, p: a * b * c,
    ),
    (
        "A hotel has {b} floors with {a} rooms on each floor, and each room has 2 beds. {c} beds are broken. How many "
        "beds can be slept in?",
        lambda a, b, c, p: 2 * a * b - c,
    ),
    (
        "{name} collects {things}: {a} in spring, {b} times as many in summer, and none in autumn. In winter {name} "
        "loses 2. How many {things} does {name} have at the end of the year?",
        lambda a, b, c, p: a + a * b - 2,
    ),
    (
        "A pizza has 8 slices. {name} orders {a} pizzas for a party, where {b} people eat 2 slices each. How many "
        "slices are left?",
        lambda a, b, c, p: 8 * a - 2 * b,
    ),
    (
        "Each of {c} cars carries {b} people, and a bus carries {a}0. How many people come to the match in all?",
        lambda a, b, c, p: b * c + 10 * a,
    ),
    (
        "A zoo has {a} monkeys, and twice as many birds as monkeys. Each bird eats {b} seeds at a time. How many seeds "
        "do all the birds eat at a time?",
        lambda a, b, c, p: 2 * a * b,
    ),
    (
        "A wall takes {a} rows of {c} tiles. {name} breaks {b} tiles while working and must replace them. How many "
        "tiles does {name} need in all?",
        lambda a, b, c, p: a * c + b,
    ),
    (
        "{name} has 3 boxes of {a} crayons and 2 boxes of {c} crayons. {b} crayons are lost. How many crayons does "
        "{name} still have?",
        lambda a, b, c, p: 3 * a + 2 * c - b,
    ),
    (
        "A choir has {a} sopranos, {b} more altos than sopranos, and {c} men. How many people sing in it?",
        lambda a, b, c, p: 2 * a + b + c,
    ),
    # Time, distance, weight
    (
        "{name} reads {a} pages on Monday, twice as many on Tuesday, and {b} pages more on Wednesday than on Tuesday. "
        "How many pages does {name} read in the three days?",
        lambda a, b, c, p: a + 2 * a + 2 * a + b,
    ),
    (
        "{name} runs {a} miles every weekday and {b} miles on each day of the weekend. How many miles is that in a "
        "week?",
        lambda a, b, c, p: 5 * a + 2 * b,
    ),
    (
        "A train travels {a}0 miles in the first hour and {b} miles more than that in the second. How far does it get "
        "in the two hours, in miles?",
        lambda a, b, c, p: 20 * a + b,
    ),
    (
        "{name} is {c} years old. {other} is {b} years older than {name}, and their mother is 3 times as old as "
        "{other}. How old is their mother?",
        lambda a, b, c, p: 3 * (b + c),
    ),
    (
        "{name} practises the piano for {a} minutes each morning and {c} minutes each evening. How many minutes is "
        "that in {b} days?",
        lambda a, b, c, p: b * (a + c),
    ),
    (
        "A film lasts {p} minutes. {name} watches {a} minutes of it on Monday and {b} times as long on Tuesday. How "
        "many minutes are left?",
        lambda a, b, c, p: p - a - a * b,
    ),
    (
        "A bag of sand weighs {a} kilograms and a bag of stones {b} kilograms more. How many kilograms do {c} bags of "
        "stones weigh?",
        lambda a, b, c, p: c * (a + b),
    ),
    (
        "A tank holds {p} litres and is full. {name} takes out {a} buckets of {b} litres, and then pours {c} litres "
        "back. How many litres are in the tank?",
        lambda a, b, c, p: p - a * b + c,
    ),
    (
        "It takes {name} {b} minutes to wash a car and {a} minutes to dry it. How many minutes does it take {name} to "
        "wash and dry {c} cars?",
        lambda a, b, c, p: c * (a + b),
    ),
    (
        "A rectangle is {a} metres long and {b} metres wide. A rope goes around it twice. How many metres long is the "
        "rope?",
        lambda a, b, c, p: 4 * (a + b),
    ),
    (
        "A garden is {a} metres long and {b} metres wide. A square pond with sides of 2 metres takes up a part of it. "
        "How many square metres are left for plants?",
        lambda a, b, c, p: a * b - 4,
    ),
    (
        "{name} walks {b} miles to school and the same way back, {a} days in a month, and {c} miles once with a "
        "friend. How many miles does {name} walk in that month?",
        lambda a, b, c, p: 2 * a * b + c,
    ),
    (
        "A candle is {p} millimetres tall and burns down {b} millimetres an hour. How many millimetres tall is it "
        "after {a} hours?",
        lambda a, b, c, p: p - a * b,
    ),
    (
        "{name} sleeps 8 hours on each of {b} nights and {a} hours on the night after. How many hours of sleep are "
        "that?",
        lambda a, b, c, p: 8 * b + a,
    ),
    (
        "A machine fills {a} bottles a minute. It runs for {c} minutes, stops, and runs for {b} minutes again. How "
        "many bottles does it fill?",
        lambda a, b, c, p: a * (b + c),
    ),
    (
        "{name} cycles at {c} miles an hour for {b} hours, and then walks {a} miles. How many miles has {name} gone?",
        lambda a, b, c, p: b * c + a,
    ),
    # Points and people
    (
        "A team wins {a} games and draws {b}. A win gives 3 points and a draw gives 1. The team had 20 points before "
        "that. How many points does it have now?",
        lambda a, b, c, p: 20 + 3 * a + b,
    ),
    (
        "In a game {name} scores {a} points in each of {b} rounds, gets a bonus of 15 points, and loses {c} points in "
        "the last round. What is the final score?",
        lambda a, b, c, p: a * b + 15 - c,
    ),
    (
        "A bus starts with {a}0 people. At each of 2 stops {b} people get off, and at the last stop {c} get on. How "
        "many people are on the bus?",
        lambda a, b, c, p: 10 * a - 2 * b + c,
    ),
    (
        "{name} gets {a} letters a day and {other} gets {b} times as many. How many letters do the two get in 5 days?",
        lambda a, b, c, p: 5 * (a + a * b),
    ),
    (
        "A school has {a} classes of 2{b} pupils. On a rainy day {c} pupils are ill. How many pupils are there that "
        "day?",
        lambda a, b, c, p: a * (20 + b) - c,
    ),
    (
        "There are {c} tables with {b} chairs each in a hall, and {a} chairs along the wall. 7 more chairs are brought "
        "in. How many chairs are there?",
        lambda a, b, c, p: b * c + a + 7,
    ),
    (
        "{name} answers {p} questions. {a} answers are wrong, {b} are left empty, and each right answer gives 2 "
        "points. How many points does {name} get?",
        lambda a, b, c, p: 2 * (p - a - b),
    ),
    (
        "A village of {p} people grows by {a} people in the first year and by {b} times as many in the second. How "
        "many people live there then?",
        lambda a, b, c, p: p + a + a * b,
    ),
)
