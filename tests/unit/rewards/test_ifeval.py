"""Each of the 25 instructions, followed and not; loose forms; the data set's own rows."""

import json

import pytest

pytest.importorskip("langdetect")
pytest.importorskip("nupunkt")

from rewards.ifeval import CHECKERS, FUNCTIONS, IfevalReward, check, forms, instructions
from spmd_rl.data.pictures import Folder
from spmd_rl.data.rows import parse_rows
from tests.unit.rewards.helpers import prompt, rows, verdict

ENGLISH = "This is a plain sentence in the English language."
CASES = [
    ("keywords:existence", {"keywords": ["rose", "tree"]}, "A Rose under trees", "A rose"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "at least"}, "War and warm", "war"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, "war", "war war"),
    ("keywords:forbidden_words", {"forbidden_words": ["rock", "c++"]}, "rocks", "A Rock."),
    ("keywords:letter_frequency", {"letter": "t", "let_frequency": 2, "let_relation": "at least"}, "Tot", "to"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"}, "#", "##"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz einfacher deutscher Satz.", ENGLISH),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "We came. Did we see?",
        "It was Dr. No.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "We came, we saw",
        "We came. We saw.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***", "a\n***\n***\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b, c", "a b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "a\n\n'So, it is",
        "so\n\na",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b] [c]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\np. s. y", "x PS y"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\nP. P.S y", "P.S. x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n**c**", "* a"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe. Bye", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2}, "PART 1\nPART2", "PART 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<A title>>\nx", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write it."}, "write it. Here", "Here: write it."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'x "the end."', "The end. x"),
    ("startend:quotation", {}, ' "a" ', '"a'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "A b", "A B"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]


@pytest.mark.parametrize(("name", "kwargs", "followed", "broken"), CASES)
def test_followed_and_not(name, kwargs, followed, broken):
    assert check(name, followed, kwargs) is True
    assert check(name, broken, kwargs) is False


def test_all_25_have_a_case():
    assert {case[0] for case in CASES} == set(CHECKERS) and len(CHECKERS) == 25


RLVR = [
    ("verify_keywords", {"keyword_list": ["Rose", "red"]}, "roses are red", "red"),
    ("verify_keyword_frequency", {"word": "red", "N": 2}, "Red, red reddish", "red red red"),
    ("validate_forbidden_words", {"forbidden_words": ["red"]}, "reddish", "a red rose"),
    ("verify_letter_frequency", {"letter": "e", "N": 2}, "E e e", "e"),
    ("validate_response_language", {"language": "en"}, ENGLISH, "Das ist ein deutscher Satz mit vielen Worten."),
    ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a\n* * *\n"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "a b c", "a b c d"),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"}, "a " * 33, "a " * 34),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "It is. So it is.", "It is."),
    ("validate_paragraphs", {"N": 2, "first_word": "b", "i": 2}, "a\n\nb c", "a\n\nc b"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a"),
    ("validate_placeholders", {"N": 1}, "[name]", "name"),
    ("verify_bullet_points", {"N": 2}, "* a\n- b", "* a"),
    ("validate_title", {}, "<<Rose>>", "Rose"),
    ("validate_choice", {"options": ["yes", "no"]}, "no\n", "n"),
    ("validate_highlighted_sections", {"N": 1}, "*a*", "a"),
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "SECTION 1\na\nSECTION 2\nb", "SECTION 1"),
    ("validate_json_format", {}, "[1]", "1]"),
    ("validate_repeat_prompt", {"original_prompt": "Why?"}, "Why? So.", "So."),
    ("validate_two_responses", {}, "a******b", "a******a"),
    ("validate_uppercase", {}, ENGLISH.upper(), ENGLISH),
    ("validate_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "NO WAY", "NO way"),
    ("validate_end", {"end_phrase": "The end."}, "a. The end.", "The end. a"),
    ("validate_quotation", {}, '"a"', "a"),
    ("validate_no_commas", {}, "a", "a,"),
]


@pytest.mark.parametrize(("name", "kwargs", "followed", "broken"), RLVR)
def test_functions_of_rlvr_ifeval(name, kwargs, followed, broken):
    assert check(name, followed, kwargs) is True
    assert check(name, broken, kwargs) is False


def test_a_row_of_rlvr_ifeval_is_judged_by_its_function():
    assert {case[0] for case in RLVR} == set(FUNCTIONS) and len(FUNCTIONS) == 25
    truth = json.dumps({"func_name": "verify_bullet_points", "N": 1, "quantifier": None, "options": None})
    record = {"messages": [{"role": "user", "content": "?"}], "ground_truth": truth}
    (row,) = parse_rows([("rows:1", record)], "x", {}, Folder(None))
    assert (row.domain, row.ground_truth) == ("ifeval", "")
    assert verdict(IfevalReward(), prompt("", **row.extra), "* a").score == 1.0
    assert verdict(IfevalReward(), prompt("", **row.extra), "a").score == 0.0


def asked(*pairs, **extra):
    return prompt("", instruction_id_list=[name for name, _ in pairs], kwargs=[kwargs for _, kwargs in pairs], **extra)


def test_loose_forgives_an_introduction_and_emphasis():
    row = asked(("startend:quotation", {}))
    answer = 'Sure, here you are:\n*"It is so."*'
    assert verdict(IfevalReward(), row, answer).score == 0.0
    assert verdict(IfevalReward(loose=True), row, answer).score == 1.0


def test_the_eight_forms():
    assert forms("a\n*b*\nc") == ["a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*", "a\nb\nc", "b\nc", "a\nb", "b"]


def test_partial_and_nothing_said():
    row = asked(("punctuation:no_comma", {"unused": None}), ("startend:quotation", None))
    assert verdict(IfevalReward(partial=True), row, "a b").score == 0.5
    assert verdict(IfevalReward(), row, "a b").parts == {"followed": 0.5}
    row = asked(("punctuation:no_comma", {}))
    assert verdict(IfevalReward(), row, "a").score == 1.0
    assert verdict(IfevalReward(), row, " ").score == 0.0
    assert verdict(IfevalReward(), row, "<think>a").score == 0.0


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (asked(("keywords:none", {})), "unknown instruction 'keywords:none'"),
        (asked(("keywords:existence", {})), "keywords:existence: cannot be checked"),
        (asked(("punctuation:no_comma", {"x": 1})), "cannot be checked"),
        (prompt("", instruction_id_list=["punctuation:no_comma"], kwargs=[]), "of the same length"),
        (prompt(""), "of the same length"),
    ],
)
def test_a_row_that_cannot_be_checked_is_an_error_not_a_zero(row, detail):
    found = verdict(IfevalReward(), row, "a")
    assert found.status == "error" and detail in found.detail


def test_every_row_of_the_data_set_can_be_checked():
    seen = set()
    for row in rows("ifeval/prompts.jsonl"):
        for name, kwargs in instructions(row):
            check(name, ENGLISH, kwargs)
            seen.add(name)
    assert seen == set(CHECKERS)
