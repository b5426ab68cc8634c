"""Owns the small sums of the synthetic dialogues: question, chain of thought digit by digit, answer.

Example:
    question, thinking, answer = arithmetic_question(random.Random(1), is_easy=False)
"""

import random

Random = random.Random
MAX_OPERAND = 99


def think_sum(left: int, right: int) -> str:
    """Column addition of numbers up to 99, ones first."""
    ones = left % 10 + right % 10
    carry = ones // 10
    text = f"{left} + {right}. Ones: {left % 10} + {right % 10} = {ones}, write {ones % 10}, carry {carry}. "
    tens = left // 10 + right // 10 + carry
    return text + f"Tens: {left // 10} + {right // 10} + {carry} = {tens}. So {left} + {right} = {left + right}."


def think_difference(left: int, right: int) -> str:
    """Column subtraction, ones first; left >= right."""
    borrow = int(left % 10 < right % 10)
    upper = left % 10 + 10 * borrow
    text = f"{left} - {right}. Ones: {upper} - {right % 10} = {upper - right % 10}, borrow {borrow}. "
    tens = left // 10 - right // 10 - borrow
    return text + f"Tens: {left // 10} - {right // 10} - {borrow} = {tens}. So {left} - {right} = {left - right}."


def think_product(left: int, right: int) -> str:
    """A number up to 99 times one digit, tens and ones apart."""
    tens, ones = left // 10 * 10, left % 10
    if tens == 0:
        return f"I know the table: {left} * {right} = {left * right}."
    parts = f"{left} * {right}. {tens} * {right} = {tens * right}. {ones} * {right} = {ones * right}."
    return f"{parts} {tens * right} + {ones * right} = {left * right}."


def think_comparison(left: int, right: int) -> str:
    """Which is larger: tens first, then ones."""
    if left // 10 != right // 10:
        larger = ">" if left > right else "<"
        return f"{left} or {right}. Tens: {left // 10} {larger} {right // 10}. So {left} {larger} {right}."
    larger = ">" if left > right else "<"
    digits = f"Tens: {left // 10} = {right // 10}. Ones: {left % 10} {larger} {right % 10}."
    return f"{left} or {right}. {digits} So {left} {larger} {right}."


def equation(rng: Random) -> str:
    """One line of the tables that a column sum is made of."""
    kind = rng.choices(["+", "+ carry", "-", "*"], weights=[45, 20, 25, 10])[0]
    top = 9 if rng.random() < 0.7 else 12
    left, right, carry = rng.randint(0, top), rng.randint(0, top), rng.randint(0, 1)
    if kind == "+":
        return f"{left} + {right} = {left + right}."
    if kind == "+ carry":
        return f"{left} + {right} + {carry} = {left + right + carry}."
    if kind == "-":
        return f"{left + right} - {right} = {left}."
    return f"{min(left, 9)} * {min(right, 9)} = {min(left, 9) * min(right, 9)}."


def comparison_question(rng: Random, *, is_easy: bool) -> tuple[str, str, str]:
    left, right = rng.sample(range(1, 21 if is_easy else MAX_OPERAND + 1), 2)
    word = rng.choice(["larger", "smaller"])
    answer = max(left, right) if word == "larger" else min(left, right)
    question = rng.choice([f"Which is {word}, {left} or {right}?", f"Which number is {word}: {left} or {right}?"])
    return question, think_comparison(left, right), f"{answer} is {word}."


def arithmetic_question(rng: Random, *, is_easy: bool) -> tuple[str, str, str]:
    """(question, chain of thought, answer). Easy questions are those that are also asked without thinking."""
    kind = rng.choices(["+", "-", "*", "compare"], weights=[52, 24, 12, 12])[0]
    if kind == "compare":
        return comparison_question(rng, is_easy=is_easy)
    top = 12 if is_easy or rng.random() < 0.15 else MAX_OPERAND
    left, right = rng.randint(0, top), rng.randint(0, top)
    if kind == "+":
        result, thinking, word = left + right, think_sum(left, right), "plus"
    elif kind == "-":
        left, right = max(left, right), min(left, right)
        result, thinking, word = left - right, think_difference(left, right), "minus"
    else:
        right = rng.randint(0, 10 if is_easy else 9)
        left = min(left, 10) if is_easy else left
        result, thinking, word = left * right, think_product(left, right), "times"
    questions = [
        f"What is {left} {kind} {right}?",
        f"What is {left} {word} {right}?",
        f"{left} {kind} {right} = ?",
        f"How much is {left} {kind} {right}?",
        f"What is {left}{kind}{right}?",
        f"{left} {kind} {right}",
    ]
    if kind == "+":
        questions.append(f"Add {left} and {right}.")
    return rng.choice(questions), thinking, f"{left} {kind} {right} = {result}."
