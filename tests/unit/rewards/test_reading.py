"""What is written in an answer, kind by kind: the truth, what equals it, and after `|` what does not; votes."""

import itertools
import random
import time

import pytest

from rewards.math_verify import MathReward
from rewards.mathematics.reading import readings
from tests.patience import patient
from tests.unit.rewards.helpers import INFO, prompt, rows

REWARD = MathReward()
WRITTEN = {
    "lists, points, intervals, sets and arguments": r"""
        (1, 100) ; (1.0, 100) ; (1, 10^2) ; (1,100) | 1100 ; 1,100.5 ; (100, 1)
        101, 103, 107 ; 107, 103, 101 ; 101,103,107 | 101, 103
        101,103,107 ; 101103107 ; 107, 103, 101 | 101103
        (5, 120) ; (5.0, 120.0) | 5120
        (2, 300) ; x=2, y=300 | 2300 ; x=300, y=2
        180 ; \max(12, 180) ; \operatorname{lcm}(36, 60) ; \max\{12,180\} | \min(12, 180)
        f(1, 200) ; f(2-1, 200) | f(1200) ; f(200, 1)
        [1, 250) ; 1 \le x < 250 | [1250) ; (1, 250)
        \{1, 200\} ; \{200, 1\} ; 200, 1 | 1200
        (2500, 7) ; (2,500, 7) | (2,500,7)
        1,234,567 ; 1234567 ; 1{,}234{,}567 ; 1\,234\,567 ; 1 234 567 | 1, 23
        (12,000, 5) ; (12000, 5) | 120005""",
    "mixed fractions": r"""
        1 1/4 ; \frac{5}{4} ; 1.25 ; 1\frac14 | \frac12 ; 11/4
        3 1/2 ; \frac72 ; 3\tfrac{1}{2} | 2 ; \frac32
        -2\frac13 ; -\frac{7}{3} | -\frac{5}{3} ; \frac{7}{3}
        12 5/8 ; \frac{101}{8} | \frac{125}{8}""",
    "upright e and i": r"""
        \mathrm{e}^2 ; e^2 ; \exp(2) | 2\mathrm{e}
        1+2i ; 1+2\mathrm{i} ; 2\text{i}+1 | 1-2\mathrm{i}
        3\mathrm{i} ; 3i | 3
        1-1/\mathrm{e} ; 1-e^{-1} | 1-e
        \mathrm{e}^{\mathrm{i}\pi/2} ; i | -i""",
    "scientific notation": r"""
        1e-05 ; 0.00001 ; 10^{-5} | 10^{-4} ; e-5
        1e+16 ; 10000000000000000 | 10^{15}
        3e8 ; 3 \times 10^8 ; 300,000,000 | 3^8
        6.25E-3 ; 0.00625 ; \frac{1}{160} | 0.0625
        2e-07 ; 0.0000002 | 1e-07""",
    "TeX without braces": r"""
        \frac{\pi}{2} ; \frac\pi2 | \frac2\pi
        \sqrt[3]{2} ; \sqrt[3]2 ; 2^{1/3} | \sqrt2
        \frac{\sqrt{3}}{2} ; \frac{\sqrt3}2 ; \frac{\sqrt 3}{2} | \sqrt{\frac32}
        \binom{5}{2} ; \binom52 ; 10 | \frac52
        x^{\frac12} ; x^\frac12 ; \sqrt x | \frac x2
        \frac\alpha\beta ; \alpha/\beta | \beta/\alpha""",
    "values far from 1": r"""
        \frac{1}{2004!} ; \frac1{2004\cdot2003!} | \frac{1}{2006!}
        10^{-400} ; 1e-400 | 10^{-500} ; 0
        2^{-1000} ; 4^{-500} | 2^{-1100}
        e^{-1000} ; (e^{-500})^2 | e^{-2000}
        1+e^{-300} ; \frac{e^{300}+1}{e^{300}} | 1 ; 1+e^{-301}
        10^{90}+1 ; 1+10^{90} | 10^{90}""",
    "bases and times": r"""
        1010_2 ; 1010_{2} ; (1010)_2 | 1010_8 ; 1010 ; 10
        2020_4 ; 2020_{4} | 2020_7
        FF_{16} ; ff_{16} | FF ; 255
        77_{10} ; 77 | 77_8
        1:20 ; 1:20 | 2:40 ; 120 ; \frac{1}{20}""",
    "percentages, repeating decimals, units": r"""
        25\% ; \frac14 ; 25 \text{ percent} ; 25 ; 0.25 | 2500 ; 4
        12.5\% ; 12.5 \text{ percent} ; \frac18 ; 12.5 % | 1.25
        \frac{1}{3} ; 0.\overline{3} ; 0.333333 | 0.3 ; 0.333
        \frac{5}{22} ; 0.2\overline{27} | 0.\overline{227}
        60 \text{ km/h} ; 60 km/h ; 60\text{ km}/\text{h} ; 60 | 60 \text{ m/s}
        90^\circ ; 90° ; 90 degrees ; 90 | 90 \text{ cm}
        \sin 30^\circ ; \frac12 | \sin 30
        77^\circ\text{F} ; 77°F ; 77 | 77^\circ\text{C}""",
    "characters": r"""
        -3 ; –3 ; −3 ; －3 | 3
        x^2 ; x² | x2
        x^{12} ; x¹² | x^1
        42 ; ４２ ; ٤٢ | ４３
        \frac34 ; ¾ ; ３/４ | 34
        2\sqrt{3} ; 2√3 ; √12 | √3
        \pi \le x ; π ≤ x | π < x""",
    "expressions": r"""
        (x+1)^2 ; x^2+2x+1 | x^2+1
        \sin 2x ; 2\sin x\cos x | 2\sin x
        |x| ; |-x| ; \sqrt{x^2} | x
        \ln|x| + C ; C+\ln|x| | \ln x + C
        y = 2x + 3 ; 2x + 3 ; 2x - y + 3 = 0 | y = 3x + 2
        x=4 ; 4 | x=\pm4
        \{\{1\}, \{1, 2\}\} ; \{\{2, 1\}, \{1\}\} | \{1, \{1, 2\}\}
        \pm\sqrt2 ; \sqrt2, -\sqrt2 ; x = \pm\sqrt{2} | \sqrt2
        X ; X | x
        \text{Tuesday May 5} ; Tuesday May 5 | \text{Monday June 5} ; 5""",
}
CASES = [
    (truth.strip(), final.strip(), expected)
    for lines in WRITTEN.values()
    for truth, right, wrong in (
        (line.split(";")[0], line.split("|" if " | " not in line else " | ")[0], line.rpartition(" | ")[2])
        for line in lines.splitlines()
        if line.strip()
    )
    for text, expected in ((right, 1.0), (wrong, 0.0))
    for final in text.split(" ; ")
]


@pytest.mark.parametrize(("truth", "final", "expected"), CASES)
def test_what_is_written_is_what_counts(truth, final, expected):
    assert REWARD.score(prompt(truth), f"So it is $\\boxed{{{final}}}$.", INFO).score == expected


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("42", "2+40=42\n#### 42\n\nLet me know if you need more help!", 1.0),
        ("42", "#### 41\nNo:\n#### 42\nHope that helps 2 of you", 1.0),
        ("42", "#### 41\nIt is nearly 42", 0.0),
        ("42", "<think>6*7</think><answer>42</answer>", 1.0),
        ("42", "\\boxed{41}, so <answer>\n the total is 42 </answer>", 1.0),
        ("42", "<answer>\\boxed{42}</answer> Not 41.", 1.0),
        ("42", "<answer>42</answer> or <answer>41</answer>", 0.0),
        ("42", "The answer is 42.\n\nLet me know if that helps!", 1.0),
        ("42", "The answer is 42?\nNo, 41.", 0.0),
        ("7/2", "It takes 3 1/2 hours.", 1.0),
        ("7/2", "It takes 3 hours and 1/2 of another.", 0.0),
        ("73", "答案是73。", 1.0),
        ("73", "答案是37。", 0.0),
        ("-3", "It is now \N{MINUS SIGN}3.", 1.0),
        ("(2, 300)", "The point is (2,300).", 1.0),
        ("2300", "The point is (2,300).", 0.0),
        ("40\\%", "So 40 percent of them are red.", 1.0),
    ],
)
def test_where_the_answer_stands(truth, answer, expected):
    assert REWARD.score(prompt(truth), answer, INFO).score == expected


def votes(truth: str, *finals: str) -> list[str]:
    return [REWARD.score(prompt(truth), f"\\boxed{{{final}}}", INFO).answer for final in finals]


@pytest.mark.parametrize(
    "parties",
    [
        r"\sin x + 2, 2 + \sin x | \cos x + 2 | 2",
        r"4 \pi r^2, 4r^2\pi | 2 \pi r | 2",
        r"x/2, \frac x2, 0.5x | 2 \ln x | \ln x + 2 | \frac 2x",
        r"\text{Monday June 5}, monday june 5 | \text{Tuesday May 5} | 5",
        r"3/4, 0.75, \frac{6}{8}, x = \frac34 | 4/3 | 75",
        r"x>1 | x \ge 1 | x>2",
    ],
)
def test_equal_answers_have_one_vote_and_others_another(parties):
    found = [votes("12345", *party.split(",")) for party in parties.split("|")]
    assert all(len(set(party)) == 1 and party[0] for party in found), found
    assert len({party[0] for party in found}) == len(found), found


def test_votes_on_deepmath_answers_agree_with_the_reward():
    truths = [row["ground_truth"] for row in rows("deepmath/train.jsonl")]
    chosen = random.Random(1).sample(truths, 400)
    for one, other in itertools.pairwise(chosen):
        same = REWARD.score(prompt(one), f"\\boxed{{{other}}}", INFO).score == 1.0
        mine, yours = votes("no truth of these", one, other)
        assert (mine == yours) == same, (one, other, mine, yours)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 3000,
        "10^{10^{10^{10}}}",
        "2^{" * 100,
        "((((((9!)!)!)!)!)!)",
        "(" * 3000,
        "{" * 500 + "}" * 500,
        "1," * 1500,
    ]
    + [
        "\\sqrt" * 500,
        "\\tan(10^{10^{6}})",
        "e" * 400 + "^9",
        "|" * 400,
        "\\frac" * 300,
        "1e999999999",
        "-" * 2000 + "1",
    ]
    + [
        "x^{99999999}",
        "\\binom{10^9}{10^8}",
        "\\zeta(10^{50})",
        "\\text{" * 300,
        "_" * 300,
        "\\gcd(10^{99999}, 7)",
        "²" * 400,
    ],
)
def test_hostile_text_is_read_in_time_or_not_at_all(text):
    start = time.process_time()
    readings(text)
    assert REWARD.score(prompt("7"), f"\\boxed{{{text}}}", INFO).score in (0.0, 0.0)
    assert time.process_time() - start < patient(2)
